"""Attention whose empty rows, those without a key, have the mean of v, as models in plain torch compute them."""

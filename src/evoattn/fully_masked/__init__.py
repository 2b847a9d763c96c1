"""Attention whose fully masked rows have the mean of v, as models in plain torch compute them."""

"""The tiles of each kernel, as functions of a problem, a config and a card."""

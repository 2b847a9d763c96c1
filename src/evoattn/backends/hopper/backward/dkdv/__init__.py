"""The kernel of the keys: dk, dv and d(mask bias)."""

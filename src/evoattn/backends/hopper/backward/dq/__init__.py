"""The kernel of the queries: dq and d(pair bias)."""

"""Proofs that a change of structure changes nothing: see `__main__`."""

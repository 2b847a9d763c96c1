"""Blocks of the clients that `evoattn.patch` knows, with random weights, compared with and without the patch.

    python3 dev.py clients [NAME ...]

One module a client says how its blocks are built and called; `compare` runs them and `__main__` prints the table.
"""

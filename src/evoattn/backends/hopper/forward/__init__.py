"""The forward: its plan, its kernel, and the exact path behind it."""

"""The backward: its plan, and a folder a kernel."""

"""The host's side of a call: how tensors are laid out, and how kernels are compiled, kept and launched."""

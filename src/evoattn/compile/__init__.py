"""Compiling kernels: processes that compile, and one folder of compiled code."""

"""The kernels, a file for each. Beside a kernel stands the function that plans one launch of it."""

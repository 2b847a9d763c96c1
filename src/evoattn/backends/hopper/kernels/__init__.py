"""The kernels: a file each for its variant and set-up, and for the warps that copy and compute."""

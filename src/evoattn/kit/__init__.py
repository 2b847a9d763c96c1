"""The pieces that Triton kernels of all rooms share: arguments, launches, small functions, and the card that they run on."""

"""The transition: `call` checks, `steps` launch, `kernels` compute."""

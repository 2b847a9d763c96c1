"""Products of float32 matrices on tensor cores: `call` checks, `steps` launch, `kernels` compute."""

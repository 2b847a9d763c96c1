"""The transition: `call` checks, `steps` launch, `kernels` compute."""

from evoattn.pair.transitions.call import reference, transition

__all__ = ["reference", "transition"]

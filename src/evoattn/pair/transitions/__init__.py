"""The transition: `call` checks and chooses, `autograd` orders the steps, `steps` launch, `kernels` compute."""

from evoattn.pair.transitions.call import reference, transition

__all__ = ["reference", "transition"]

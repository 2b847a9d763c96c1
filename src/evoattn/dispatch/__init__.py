"""From a call to a backend: checks, axes, the look-up of a plan, autograd, operators, sharded tensors.

`calls.attend` is the way in. `explain.explain_call` shows what it would run.
"""

"""What runs a call: the choice of a backend, the cache of plans, the ways that lead to a plan, and autograd."""

"""All gradients of a call without a pair bias in one kernel."""

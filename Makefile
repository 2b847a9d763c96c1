# Short names for dev.py, which needs nothing but Python: `make demo` runs the main job, `make test` passes the quick tests.
PYTHON ?= python3

.PHONY: demo test test-slow test-all check lint format docs bench figures goals clients doctor setup
demo test test-slow test-all check lint format docs bench figures goals clients doctor setup:
	@$(PYTHON) dev.py $@

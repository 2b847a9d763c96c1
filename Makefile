# Short names for dev.py, which needs nothing but Python: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3

.PHONY: demo test check format docs bench figures goals clients doctor setup
demo test check format docs bench figures goals clients doctor setup:
	@$(PYTHON) dev.py $@

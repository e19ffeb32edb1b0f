# make serve and make test are all that most people need; each sets up what is missing.
PY := .venv/bin/python
SOURCES := penstock tests tools examples

.PHONY: serve test test-slow check format clean

serve: .venv/.runtime
	.venv/bin/penstock serve demo $(ARGS)

test test-slow: export PYTHONDONTWRITEBYTECODE =# tests start many processes: compiled modules start faster

test: .venv/.dev
	$(PY) -m pytest -n 2 --dist worksteal -m "not slow" $(ARGS)

test-slow: .venv/.dev
	$(PY) -m pytest -m "slow or hypothesis" --hypothesis-profile thorough $(ARGS)

check: .venv/.dev
	.venv/bin/ruff check $(SOURCES)
	.venv/bin/ruff format --check $(SOURCES)
	.venv/bin/mypy penstock tools
	$(PY) -m pytest tests/arch

format: .venv/.dev
	.venv/bin/ruff check --fix $(SOURCES)
	.venv/bin/ruff format $(SOURCES)

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/.runtime: pyproject.toml tools/setup.sh
	tools/setup.sh bench
	@touch $@

.venv/.dev: pyproject.toml tools/setup.sh
	tools/setup.sh bench,dev
	@touch .venv/.runtime $@

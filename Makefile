# make serve and make test are all that most people need; each sets up what is missing.
PY := .venv/bin/python
SOURCES := penstock tests tools examples

.PHONY: serve test test-slow test-clients check format clean

serve: .venv/.runtime
	.venv/bin/penstock serve demo $(ARGS)

test test-slow: export PYTHONDONTWRITEBYTECODE =# tests start many processes: compiled modules start faster

test: .venv/.dev
	$(PY) -m pytest -n 2 --dist worksteal -m "not slow" $(ARGS)

test-slow: .venv/.dev
	$(PY) -m pytest -m "slow or hypothesis" --hypothesis-profile thorough $(ARGS)

test-clients: .clients/.ready
	.clients/bin/python -m pytest tests/e2e/clients tests/e2e/test_other_apis.py $(ARGS)

check: .venv/.dev
	.venv/bin/ruff check $(SOURCES)
	.venv/bin/ruff format --check $(SOURCES)
	.venv/bin/mypy penstock tools
	$(PY) -m pytest tests/arch

format: .venv/.dev
	.venv/bin/ruff check --fix $(SOURCES)
	.venv/bin/ruff format $(SOURCES)

clean:
	rm -rf .venv .clients .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/.runtime: pyproject.toml tools/setup.sh
	tools/setup.sh bench
	@touch $@

.venv/.dev: pyproject.toml tools/setup.sh
	tools/setup.sh bench,dev
	@touch .venv/.runtime $@

# beside .venv, and over it: some clients want other versions of what it has
SITE := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
.clients/.ready: .venv/.dev pyproject.toml
	$(PY) -m venv .clients
	$(PY) $(SITE) > "$$(.clients/bin/python $(SITE))/base.pth"
	.clients/bin/python -m pip install --quiet --editable ".[clients]"
	@touch $@

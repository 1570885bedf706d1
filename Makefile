# make check | test | test-all | soak | serve | try | tools: people, pre-commit and CI run these and nothing else.
VENV ?= .venv
PY := $(VENV)/bin/python
PORT ?= 8000
N ?= 10000
ADMIN_PORT ?= 8001
SETTINGS ?= deploy/settings/local.toml
TORCH := $(shell grep '^torch==' requirements.lock)

.PHONY: install check format test test-all soak serve try tools

install: $(VENV)/.installed

$(VENV)/.installed: requirements.lock pyproject.toml
	test -x $(PY) || python3 -m venv $(VENV)
	$(PY) -m pip install -q $(TORCH)
	$(PY) -m pip install -q -r requirements.lock
	$(PY) -m pip install -q --no-deps --no-build-isolation -e .
	touch $@

format: install
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

check: install
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports
	$(PY) scripts/sizes.py

test: install
	$(PY) -m pytest -q -m "not slow"

test-all: install
	$(PY) -m pytest -q

soak: install
	$(PY) -m tests.chaos.soak --requests $(N)

serve: install
	PORT=$(PORT) ADMIN_PORT=$(ADMIN_PORT) exec $(VENV)/bin/baton serve $(SETTINGS)

try: install
	deploy/try.sh --venv $(VENV)

# Debian's packages for tests that are skipped by name without them; kubectl comes from your cluster.
tools:
	apt-get install -y --no-install-recommends chromium prometheus

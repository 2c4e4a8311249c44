# Two commands are all that a newcomer needs: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# `make demo TORCH=cpu` installs torch without CUDA, which is much smaller.
TORCH ?=
ifeq ($(TORCH),cpu)
INSTALL := $(PIP) install --quiet --constraint constraints-cpu.txt --extra-index-url https://download.pytorch.org/whl/cpu
STAMP := -cpu
else
INSTALL := $(PIP) install --quiet --constraint constraints.txt --constraint constraints-torch.txt
endif
INSTALLED := .venv/.installed$(STAMP)
INSTALLED_DEV := .venv/.installed-dev$(STAMP)

.PHONY: demo test test-all kernels lint types results docs lowest clean

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py

# What to run while working.
test: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=auto --dist=worksteal -m "not slow"

# The rest: processes, the browser, the wheel, the README's commands, longer trainings.
test-all: $(INSTALLED_DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=auto --dist=worksteal -m slow

# The tests of our Triton kernels, by its interpreter: no GPU is needed.
kernels: $(INSTALLED_DEV)
	$(INSTALL) --editable '.[kernels]'
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest --numprocesses=auto tests/runtime/test_kernels.py

lint: $(INSTALLED_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell --skip="*.ipynb,*.png" dg_lightning callbacks datamodules configs tests benchmarks examples docs results/*.py results/*.j2 *.md
	@# Phrases that read as translated, see CONTRIBUTING.md.
	! grep --recursive --line-number --extended-regexp --file=tests/phrases.txt --include=*.py --include=*.md --include=*.yaml --include=*.ipynb \
		dg_lightning callbacks datamodules configs tests benchmarks examples docs results README.md ARCHITECTURE.md CONTRIBUTING.md

types: $(INSTALLED_DEV)
	$(BIN)/mypy

# RESULTS.md and the README's table, from the tables in results/.
results: $(INSTALLED_DEV)
	$(BIN)/python results/page.py

# The site, in build/site: no network is needed.
docs: $(INSTALLED_DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# The tests with the oldest versions that pyproject.toml allows.
lowest:
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet uv
	.venv-lowest/bin/uv pip install --quiet --python .venv-lowest/bin/python --resolution lowest-direct --editable '.[dev,vision,audio,cells,tables,plot,study,wandb,export,models]'
	OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest --numprocesses=auto --dist=worksteal -m "not slow"

clean:
	rm -rf .venv .venv-lowest build dist runs .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/bin/python:
	$(PYTHON) -m venv .venv

$(INSTALLED): pyproject.toml $(wildcard constraints*.txt) | .venv/bin/python
	$(INSTALL) --editable .
	touch $@

$(INSTALLED_DEV): pyproject.toml $(wildcard constraints*.txt) | .venv/bin/python
	$(INSTALL) --editable '.[dev,vision,audio,cells,tables,plot,study,wandb,export,models]'
	touch $@

# Two commands do everything on a machine with Python 3.11: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test integrations old-triton other-gpus lint format benchmark clean

demo: $(READY)
	$(BIN)/longspan demo --out demo

test: lint
	$(BIN)/python -m pytest -n auto

# The plug-ins' libraries are large (0.8 GB, most of it pyarrow, scipy, pandas and wandb), so only these tests ask for them.
integrations: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[torchtitan,lm-eval]'
	$(BIN)/python -m pytest tests/test_torchtitan.py tests/test_lm_eval.py

# Kernels that newer compilers take: 190 MB, and a minute on one core.
old-triton: $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target build/triton-3.6 triton==3.6.0
	PYTHONPATH=build/triton-3.6 $(BIN)/python tests/compile_kernels.py

# Kernels fit and compile for A100, L40S and GeForce 30 and 40, B200, GeForce 50: three minutes of a core each.
other-gpus: $(READY)
	$(BIN)/python tests/other_gpus.py 80 86 89 100 120

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmark: $(READY)
	$(BIN)/python benchmarks/entmax_cpu.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis

# The mark is made last, so that a set-up that was cut short starts over.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cli,train,plots,lm,transformers,dev]'
	touch $(READY)

# Every target does its own set-up, in this directory, from nothing but python3 (3.11 or newer) with venv and pip.
# ARGS is handed on:    make test ARGS="-k csv -x"    make demo ARGS="--steps 200"
# Another interpreter:  make test PYTHON=python3.11

PYTHON ?= python3
ARGS ?=
EXAMPLES ?= 2000

# Ranks and test workers are processes of their own; more threads than that would only take turns on the cores.
export OMP_NUM_THREADS ?= 1

# Tests start hundreds of processes. Each would compile the package and its tests again if it could not keep the result.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo demo-fault check test prove drill lint bench versions wheel clean environment numpy2 peer

# One worker more than cores: tests often wait for processes that wait for each other.
WORKERS := $(shell $(PYTHON) -c 'import os; print(min(len(os.sched_getaffinity(0)) + 1, 8))')
# The longest test takes two minutes on a slow machine, so one that takes ten hangs. It fails, with the stacks of its threads.
PYTEST = -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --timeout 600

# The inner loop: the folders that start few processes and compile nothing.
UNIT := $(addprefix tests/,anomalies compare convert coordinator dump dynamic pipeline recording sinks stats) \
	$(wildcard tests/test_*.py) --ignore tests/stats/triton

help:
	@echo "make demo        train a small GPT on two ranks, monitored, show what was recorded, merge it (ARGS=\"--steps 200\")"
	@echo "make demo-fault  let something break on one of two ranks, and find out where (ARGS=\"--seed 3\": somewhere else)"
	@echo "make check       the inner loop: unit tests, linters, types (3 minutes on two cores)"
	@echo "make test        all that a change can break (12 minutes; ARGS=\"-k csv\": those; ARGS=--mindspore: those of MindSpore)"
	@echo "make prove       every case that make test takes samples of, and EXAMPLES=2000 generated training loops, then the drills (three hours)"
	@echo "make drill       an hour of faults: full disks, kills, lost ranks, damaged files (ARGS=\"--minutes 5 --seed 7\")"
	@echo "make lint        ruff and mypy"
	@echo "make bench       the benchmarks beside mindstudio-probe, which gets an environment of its own (.venv-peer)"
	@echo "make versions    a short contract under old and new Pythons, torches and MindSpores (gigabytes; ARGS=\"--only python3.12\")"
	@echo "make wheel       the package for other machines, in dist/: with its modules in C, for Python 3.11 and later"
	@echo "make clean       remove the environments and caches; recordings stay"

environment:
	@$(PYTHON) tools/environment.py .venv -c constraints.txt -e '.[torch,test]'

# The same environment, but for numpy: MindSpore needs 1.x, torch's users have 2.
numpy2: environment
	@$(PYTHON) tools/environment.py .venv-numpy2 --over .venv --no-deps numpy==2.4.6 setuptools==84.2.1

peer:
	@$(PYTHON) tools/environment.py .venv-peer torch==2.13.0 mindstudio-probe==26.2.0

demo: environment
	@.venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 tools/demo/train.py $(ARGS)

demo-fault: environment
	@.venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 tools/demo/find_fault.py $(ARGS)

check: environment
	.venv/bin/python $(PYTEST) $(UNIT) $(ARGS)

# Torch's tests run with numpy 2, MindSpore's and the inner loop with numpy 1.
ifeq ($(ARGS),)
test: environment numpy2
	.venv-numpy2/bin/python $(PYTEST)
	.venv/bin/python $(PYTEST) --mindspore
else
test: environment numpy2
	$(if $(findstring --mindspore,$(ARGS)),.venv,.venv-numpy2)/bin/python $(PYTEST) $(ARGS)
endif

# Samples become everything; the generated loops are others than in the tests, and as many as EXAMPLES says.
prove: environment numpy2
	PROVE=1 .venv-numpy2/bin/python $(PYTEST) --timeout 0
	PROVE=1 .venv/bin/python $(PYTEST) --timeout 0 --mindspore
	PROVE=1 .venv/bin/python $(PYTEST) --timeout 0 $(UNIT)
	GENERATED_LOOPS=$(EXAMPLES) .venv/bin/python -m pytest tests/generated_loops -x
	GENERATED_LOOPS=$(EXAMPLES) .venv/bin/python -m pytest --mindspore tests/mindspore/generated_loops -x
	.venv/bin/python tools/drills/drill.py
	.venv/bin/python tools/drills/soak.py
	.venv/bin/python bench/compare_runs.py
	.venv/bin/python bench/spikes.py

# Cases of both frameworks, so with the environment that has both.
drill: environment
	.venv/bin/python tools/drills/drill.py $(ARGS)

lint: environment
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m mypy

bench: environment peer
	.venv/bin/python bench/kernels.py
	.venv/bin/python bench/writer.py
	.venv/bin/python bench/formats.py
	.venv/bin/python bench/merge.py
	.venv/bin/python bench/report.py --page
	.venv/bin/python bench/rules.py
	.venv/bin/python bench/ranking.py
	.venv/bin/python bench/collectives.py --peer-python .venv-peer/bin/python
	.venv/bin/python bench/dynamic.py
	.venv/bin/python bench/features.py
	.venv/bin/python bench/precision_dump.py
	.venv/bin/python bench/mindspore_overhead.py
	.venv/bin/python bench/mindspore_precision_dump.py
	.venv/bin/python bench/overhead.py --peer-python .venv-peer/bin/python $(ARGS)

versions:
	$(PYTHON) tools/versions.py $(ARGS)

wheel: environment
	.venv/bin/python -m build --wheel --outdir dist

clean:
	rm -rf .venv .venv-numpy2 .venv-peer build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed
TRAIN := .venv/.installed-train
LINT := .venv/.installed-lint
DOCS := .venv/.installed-docs
VENV = @test -x $(BIN)/python || $(PYTHON) -m venv .venv
INSTALL = tools/install
# On all cores, and of depthmix too, which processes of tests would compile again and again;
# without what is not imported: packages' tests, most architectures of transformers, and some large parts of others.
UNUSED = transformers/models|pip|setuptools|mypy|mypyc|tests?|torch/testing/_internal|torchgen|sympy/physics|pygments/lexers|fontTools|pydantic|tensorboard|async_api|narwhals|werkzeug|grpc|torch/_vendor|numpy/distutils|sympy/stats|huggingface_hub/inference
UNUSED := $(UNUSED)|benchmarks?|cli|click|typer|markdown|markdown_it|tomlkit|_plotly_utils|f2py|numpy/polynomial|absl/testing|triton/tools
UNUSED := $(UNUSED)|sympy/(crypto|holonomic|parsing/autolev|parsing/latex|vector)|transformers/(exporters|pipelines)|test_utils
UNUSED := $(UNUSED)|hypothesis/extra|fsspec/implementations|rich/_unicode_data|torch/(ao/ns|ao/pruning|backends/_nnapi|utils/hipify)
UNUSED := $(UNUSED)|torch/distributed/(_tools|optim)
COMPILE = @$(BIN)/python -m compileall -qq -j 0 -x '/($(UNUSED))/' .venv/lib depthmix || true

.PHONY: setup demo test coverage test-harness test-gpu bench docs lint format new-mixer wheel clean

setup: $(STAMP)

# Newer than what it was installed from: nothing to do.
$(STAMP): pyproject.toml constraints.txt
	$(VENV)
	$(INSTALL) dev
	$(COMPILE)
	@touch $(STAMP)

# A third of the above in bytes: what a user of the command line installs.
$(TRAIN): pyproject.toml constraints.txt
	$(VENV)
	$(INSTALL) train
	$(COMPILE)
	@touch $(TRAIN)

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(TRAIN))
	@test -f data/sotu/meta.json || $(BIN)/depthmix data --input corpora/sotu --out data/sotu --vocab-size 512
	$(BIN)/depthmix compare --recipe recipes/demo.yaml

# Named, plugins are only these: pytest would rewrite assertions in all files of hypothesis, which is one too.
# Bytecode is written, whatever the shell says: each of some thousand processes would compile tests and models of transformers again.
PYTEST = PYTHONDONTWRITEBYTECODE= PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(BIN)/python -m pytest -p xdist -n 2 --dist worksteal --durations=10
test: $(STAMP)
	$(PYTEST) $(PYTEST_ARGS)

# The same with coverage, which makes kernels in the interpreter twice as slow. pytest-cov makes every report twice.
coverage: $(STAMP)
	$(PYTEST) -p pytest_cov --cov --cov-report= $(PYTEST_ARGS)
	$(BIN)/coverage report --skip-covered --fail-under=95

# 470 MB more, so not part of `test`, where it is skipped.
test-harness: $(STAMP)
	$(INSTALL) dev,eval
	$(BIN)/python -m pytest tests/hf/test_harness.py $(PYTEST_ARGS)

# Without `make setup`: a GPU machine has a torch of its own.
test-gpu:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,python3) -m pytest tests/gpu $(PYTEST_ARGS)

bench: $(STAMP)
	$(BIN)/python -m benchmarks all $(BENCH_ARGS)

$(LINT): $(STAMP)
	$(INSTALL) dev,lint
	@touch $(LINT)

lint: $(LINT)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/docstrings.py
	$(BIN)/python tools/prose.py
	$(BIN)/mypy

$(DOCS): $(STAMP)
	$(INSTALL) dev,docs
	@touch $(DOCS)

# The variable keeps mkdocs-material from printing its authors' notice about later versions, which is no warning about these pages.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python tools/site_links.py site

format: $(LINT)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

new-mixer:
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,python3) tools/new_mixer.py "$(NAME)"

wheel: $(STAMP)
	$(BIN)/python -m build --wheel --no-isolation --outdir dist

clean:
	rm -rf .venv data runs dist build site .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage

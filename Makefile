PYTHON ?= python3
CONTROL := .venv/.ready
ENGINE := .venv-engine/.ready
MODEL := .warmfront/models/sample-100m
# Somebody's own folder of templates: make demo PROMPTS=dir. Another L2: make demo L2=valkey|valkey-tls|fs|s3|plugin
CONFIG := $(if $(L2),.warmfront/$(L2).yaml,$(if $(PROMPTS),.warmfront/prompts.yaml,deploy/local/warmfront.yaml))
CHANGES := $(if $(PROMPTS),--prompts "$(PROMPTS)") $(if $(L2),--l2 "$(L2)")
RUN := WARMFRONT_CONFIG=$(CONFIG) .venv/bin/

.PHONY: all demo ui up down check test bench screenshots lock clean config sample
.DEFAULT_GOAL := all

all: ## both environments and the sample model
	@$(MAKE) -s --no-print-directory -j2 $(CONTROL) $(ENGINE)
	@$(MAKE) -s --no-print-directory sample

$(CONTROL): deploy/control_plane/requirements.lock pyproject.toml deploy/make_env.py
	@echo "making .venv (control plane)"
	@$(PYTHON) deploy/make_env.py .venv $< .
	@touch $@

$(ENGINE): deploy/engine/requirements.lock deploy/engine/extensions/pyproject.toml deploy/make_env.py
	@echo "making .venv-engine (vLLM and LMCache for CPU)"
	@$(PYTHON) deploy/make_env.py .venv-engine $< deploy/engine/extensions
	@touch $@

sample:
	@.venv/bin/python deploy/local/make_topics.py deploy/local/prompts/topics
	@[ -e $(MODEL) ] || .venv-engine/bin/python deploy/local/make_model.py $(MODEL)

config:
	@$(if $(strip $(CHANGES)),.venv/bin/python deploy/local/configure.py $(CONFIG) $(CHANGES))

demo: all config ## warm the sample prompts on real engines, and prove it
	@$(RUN)python deploy/local/demo.py

ui: all config ## the Dagster UI on the demo's state
	@DAGSTER_HOME="$$($(RUN)python -m pipelines.runs)" $(RUN)dagster dev -w workspace.yaml

up: all config ## start the embedded stack
	@$(RUN)warmfront up

down: ## stop it
	@$(RUN)warmfront down

check: $(CONTROL) ## lint, types, layers
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports

test: all ## every test that can run here
	@.venv/bin/pytest $(ARGS)

bench: all ## every ratio, measured in one run; ONLY=name,chapter,pattern for some of them
	@PYTHONPATH=tests .venv/bin/python -m benchmarks "$(ONLY)"

screenshots: all ## the README's, from the browser's test
	@WARMFRONT_SCREENSHOTS=$(CURDIR)/deploy/local/screenshots .venv/bin/pytest tests/e2e/test_ui.py $(ARGS)

lock: ## renew both locks from pyproject.toml and deploy/engine/requirements.in
	$(PYTHON) deploy/make_env.py --renew deploy/control_plane/requirements.lock -e '.[local,dev]'
	$(PYTHON) deploy/make_env.py --renew deploy/engine/requirements.lock -r deploy/engine/requirements.in

clean: ## forget the demo's state; the environments stay
	-@for config in deploy/local/warmfront.yaml $(wildcard .warmfront/*.yaml); do WARMFRONT_CONFIG=$$config .venv/bin/warmfront down; done
	rm -rf .warmfront deploy/local/prompts/topics

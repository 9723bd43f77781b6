# SPDX-License-Identifier: Apache-2.0
# `make up` serves the demo model; `make test` sets up what it needs and runs every check. YES=1 agrees to
# installing what is missing (Docker Engine, debootstrap, python3-venv); docker/host.sh says what and why.
HOST := docker/host.sh
PYTHON ?= python3
UV ?= uv
BIN := .venv/bin
OUT ?= bench/out

export GOAL := $(MAKECMDGOALS)

.DEFAULT_GOAL := help
.PHONY: help up down logs clean-state prepare test test-full ci lint unit image container container-full bench bench-guard tables lock

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-15s %s\n", $$1, $$2 }' Makefile

up: ## set Docker up where it is missing, build, start, wait until ready
down: ## stop and remove the container; its volumes stay
logs: ## follow the container's log
clean-state: ## like down, and remove the volumes: models, compile caches, snapshots
prepare: ## Docker Engine and base image alone
image: ## build the image
up down logs clean-state prepare image:
	@$(HOST) $@

test: ## lint, unit and integration tests, image, container tests
	@$(HOST) timed lint unit image container
test-full: ## the same with the long container tests; reports go to bench/results
	@$(HOST) timed lint unit image container-full

ci: ## test, and the guard of the benchmark
	@$(HOST) timed lint unit image container bench-guard
bench: image ## restarts by mode, measured and drawn, into OUT (bench/out); under 20 minutes
	@$(HOST) run $(PYTHON) bench/run.py $(OUT)
bench-guard: ## two rounds of it: fails only where a ratio collapses
	@$(HOST) run $(PYTHON) bench/run.py $(OUT) --guard

lint: .venv/stamp ## ruff, mypy, shellcheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck docker/host.sh .ci/run
unit: .venv/stamp ## unit and integration tests: no Docker
	$(BIN)/pytest tests/unit tests/integration
container: .venv/stamp ## tests of the built image
	@$(HOST) run $(BIN)/pytest tests/container -m "not full"
container-full: .venv/stamp ## the same in whole
	@WARMHOLD_TEST_REPORT_DIR=bench/results $(HOST) run $(BIN)/pytest tests/container

.venv/stamp: requirements-dev.lock
	@$(HOST) python $(PYTHON)
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --disable-pip-version-check --require-hashes -r requirements-dev.lock
	@touch $@

tables: .venv/stamp ## write the README's tables of settings and exit codes, and the benchmark's schema
	PYTHONPATH=entrypoint $(BIN)/python tests/readme_tables.py
	PYTHONPATH=entrypoint:snapshot:wcache $(BIN)/python bench/make_schema.py

lock: ## pin the development requirements anew
	$(UV) pip compile --quiet pyproject.toml --extra dev --universal --python-version 3.11 \
		--generate-hashes --no-config --custom-compile-command "make lock" --output-file requirements-dev.lock

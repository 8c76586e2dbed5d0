# make demo    a fleet on this machine loses its leader, and nothing else
# make test    all tests, at a scale that takes at most 15 minutes on two cores
# make lint    style, types, layers
# make help    the rest

# PYTHON=python3.13 uses another interpreter than python3, in an environment of its own.
VENV := .venv$(if $(PYTHON),-$(subst /,-,$(patsubst /%,%,$(PYTHON))))
PY := $(VENV)/bin/python
ELECTION := tests/simulation/test_elections.py tests/processes/test_election.py \
  tests/processes/test_idle_cost.py
SHARING := tests/integration/jobs/test_pins.py tests/processes/test_jobs.py
RETENTION := tests/integration/queue/test_maintenance.py
QUEUE := tests/processes/test_queue.py tests/processes/test_queue_places.py tests/processes/test_rolling_deploy.py tests/integration/queue/test_outages.py tests/integration/queue/test_depth.py \
  tests/integration/queue/test_page_costs.py $(RETENTION)
OPERATE := tests/processes/test_operate.py tests/processes/test_supervisor.py tests/integration/cli/test_help.py \
  tests/integration/cli/test_shutdown.py
DEATH := tests/processes/test_local_death.py
SCHEDULER := tests/unit/core/test_cron_dst.py tests/processes/test_scheduler_processes.py
TTL := tests/integration/ttl/test_costs.py tests/integration/database/test_partition_costs.py \
  tests/conformance/test_partition_crashes.py
STORES := tests/integration/stores/test_objects.py tests/integration/stores/test_first_connect.py
OTHERS := $(ELECTION) $(SHARING) $(QUEUE) $(OPERATE) $(DEATH) $(SCHEDULER) $(TTL)
FULL := --scale=full --timeout=7200 -s
# Tests start hundreds of processes: each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help
.PHONY: help setup test lint format docs demo prove-stores prove-election prove-jobs prove-queue \
  prove-retention prove-operate prove-death prove-scheduler prove-ttl prove-worlds certify-s3 simulate mutants api histories bench-stores bench-resources bench-jobs bench-queue \
  bench-peers bench-compare clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: ## create .venv with everything that the tests need; PYTHON=python3.13 creates .venv-python3.13
	@PYTHON=$(PYTHON) bash scripts/setup $(VENV)

test: setup ## all tests, on two cores; PYTHON=python3.13 runs them with that interpreter
	@bash scripts/compile-tests $(PY)
	bash scripts/with-temporary-files-in-memory $(PY) -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: setup ## ruff, mypy, pyright, import-linter
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PY) -m mypy
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(PY) -m pyright -p tests/typing --pythonpath $(PY)
	$(VENV)/bin/lint-imports

format: setup ## rewrite the code in the project's format
	$(VENV)/bin/ruff check --fix-only .
	$(VENV)/bin/ruff format .

docs: .venv-docs/.ready ## the documentation as a site in site/; ARGS=serve shows it at 127.0.0.1:8000
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs $(or $(ARGS),build)

.venv-docs/.ready: pyproject.toml
	@echo "docs: creating .venv-docs (once; about half a minute)"
	@$(or $(PYTHON),python3) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	@.venv-docs/bin/python -m pip install --quiet --group docs
	@cd .venv-docs && (npm pack --silent mermaid@11 && tar -xzf mermaid-*.tgz package/dist/mermaid.min.js) > /dev/null 2>&1 \
	  || echo "docs: without npm, the diagrams of the site are drawn only by browsers that can reach unpkg.com"
	@touch $@

demo: setup ## a fleet of processes on this machine, whose leader is killed; ARGS="--url URL --workers 4 --seconds 30 --keep"
	@$(PY) -m jobsync demo $(ARGS)

prove-stores: setup ## races, lost replies, first connects and exits at full scale; appends to proof/runs.jsonl
	$(PY) -m pytest tests/processes $(STORES) $(OTHERS:%=--ignore=%) $(FULL) $(ARGS)

prove-election: setup ## elections of real processes that are killed, frozen and blocked; appends to proof/runs.jsonl
	$(PY) -m pytest $(ELECTION) $(FULL) $(ARGS)

prove-jobs: setup ## task sharing by real processes that join, leave, are killed and frozen; appends to proof/runs.jsonl
	$(PY) -m pytest $(SHARING) $(FULL) $(ARGS)

prove-queue: setup ## 300 simulated hours on SQLite, 80 on PostgreSQL, 150 on an object store, 50 with groups and keys and 30 with transactions and results, then real processes that are killed and frozen; appends to proof/runs.jsonl
	@$(PY) tests/simulation/simulate.py queue --hours 300 --jobs $(or $(JOBS),2)
	@$(PY) tests/simulation/simulate.py queue-postgres --hours 80 --jobs $(or $(JOBS),2)
	@$(PY) tests/simulation/simulate.py queue-pages --hours 150 --jobs $(or $(JOBS),2)
	@$(PY) tests/simulation/simulate.py queue-places --hours 50 --jobs $(or $(JOBS),2)
	@$(PY) tests/simulation/simulate.py queue-places-postgres --hours 20 --jobs $(or $(JOBS),2)
	@$(PY) tests/simulation/simulate.py queue-places-pages --hours 20 --jobs $(or $(JOBS),2)
	@$(PY) tests/simulation/simulate.py queue-outcomes --hours 30 --jobs $(or $(JOBS),2)
	@$(PY) tests/simulation/simulate.py queue-outcomes-postgres --hours 10 --jobs $(or $(JOBS),2)
	$(PY) -m pytest $(QUEUE) $(FULL) $(ARGS)

prove-retention: setup ## the part of prove-queue with 60,000 messages a minute for ten minutes, on each database
	$(PY) -m pytest $(RETENTION) $(FULL) $(ARGS)

prove-operate: setup ## rolling restarts under load, a store that is gone for 30 s, shutdowns; appends to proof/runs.jsonl
	$(PY) -m pytest $(OPERATE) $(FULL) $(ARGS)

prove-death: setup ## killed processes whose death is known at once on this machine; appends to proof/runs.jsonl
	$(PY) -m pytest $(DEATH) $(FULL) $(ARGS)

prove-scheduler: setup ## schedules at every clock change of every zone, then real processes; appends to proof/runs.jsonl
	$(PY) -m pytest $(SCHEDULER) $(FULL) $(ARGS)

prove-ttl: setup ## 300 simulated hours of records that expire, then sweeps and lookups among a million; appends to proof/runs.jsonl
	@$(PY) tests/simulation/simulate.py records --hours 300 --jobs $(or $(JOBS),2)
	$(PY) -m pytest $(TTL) $(FULL) $(ARGS)

prove-worlds: setup ## every simulated story, and every mutant that the simulated worlds must notice
	$(PY) -m pytest tests/simulation -n 4 --dist loadfile --no-loadscope-reorder $(FULL) $(ARGS)

certify-s3: setup ## run the conformance suite and the probe on four S3 servers
	@bash scripts/install-ceph
	@for server in seaweed ministack ceph; do \
	  echo "== $$server"; \
	  $(PY) -m pytest -q tests/conformance -k "s3" --s3=$$server && \
	  $(PY) -m pytest -q tests/integration/stores/test_first_connect.py tests/integration/cli/test_doctor.py \
	    -k "first_connect or bucket_passes or false_verdict" --s3=$$server || exit 1; \
	done
	@echo "== rclone, which must be refused"
	$(PY) -m pytest -q tests/integration/cli/test_doctor.py -k "ignores_conditions"

simulate: setup ## simulate fleets under faults with fresh seeds: HOURS=10 JOBS=2; WHAT=queue, queue-postgres, queue-pages, queue-places, queue-places-postgres, queue-outcomes, schedule, records or stories
	@$(PY) tests/simulation/simulate.py $(WHAT) --hours $(or $(HOURS),10) --jobs $(or $(JOBS),2)

mutants: setup ## run the tests against small bugs, and print which they miss; ARGS=queue for a package or a name; AT_LEAST=90
	@bash scripts/with-temporary-files-in-memory $(PY) tests/mutants/run.py --jobs $(or $(JOBS),4) --at-least $(or $(AT_LEAST),0) $(ARGS)

api: setup ## rewrite the recorded public interface and the reference pages that the tests compare
	@$(PY) tests/support/public_api.py
	@$(PY) tests/support/sync_stub.py
	@$(PY) tests/support/reference_pages.py

histories: setup ## compare all simulated histories with the recorded ones; WRITE=1 records them
	@$(PY) tests/simulation/histories.py --jobs $(or $(JOBS),2) $(if $(WRITE),--write) $(ARGS)

bench-stores: setup ## CPU time of stores over their bare drivers
	@$(PY) benchmarks/stores.py

bench-resources: setup ## insert_many of 10,000 records over a bare insert on PostgreSQL
	@$(PY) benchmarks/resources.py

bench-jobs: setup ## the leader's decisions; claims, audits and pins over bare PostgreSQL; rebalances; idle cost
	@$(PY) benchmarks/assignment.py
	@$(PY) benchmarks/pins.py
	@$(PY) benchmarks/jobs.py

bench-queue: setup ## draining and pushing over the same work sent bare; latency; idle cost; priorities, groups and keys; pages on S3
	@$(PY) benchmarks/queues.py
	@$(PY) benchmarks/queues_placed.py
	@$(PY) benchmarks/queues_pages.py

bench-peers: setup ## the queue beside graphile-worker, pg-boss, pgqueuer, procrastinate, huey and bare drivers; ARGS=--quick or --write
	@$(PY) benchmarks/peers/run.py $(ARGS)

bench-compare: setup ## bench-queue and bench-jobs of BASE and of this tree in turns: BASE=main PAIRS=9 ARGS=--quick
	@$(PY) benchmarks/compare.py $(BASE) --pairs $(or $(PAIRS),9) $(ARGS)

clean: ## remove what setup and the tests created
	rm -rf .venv .venv-* site .bench-peers .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

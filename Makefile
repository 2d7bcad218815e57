# `make help` lists the targets. CI runs `make test`: run it before you push.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# kind if a Docker engine is running, otherwise local. CLUSTER=local or CLUSTER=kind selects one.
export CLUSTER ?= auto
# A local cluster runs Kubernetes 1.37. KUBERNETES=1.36 selects 1.36.

# Tests start Python hundreds of times: without compiled modules, each start takes a second longer.
unexport PYTHONDONTWRITEBYTECODE

# Nothing directly below the repository may shadow the standard library (operator/ would).
export PYTHONSAFEPATH := 1

UV_COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header
PACKAGES := drakit formats daemon explain cli nodeplugin driver operator
PY := $(PACKAGES) proto examples tests e2e bench tools

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

# ---------------------------------------------------------------- set-up

$(VENV)/.done: requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "Python's venv module is missing: run 'make deps' as root, or install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --require-hashes --requirement requirements/dev.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

.PHONY: venv
venv: $(VENV)/.done ## create the development environment from pinned requirements

DEBIAN_PACKAGES := python3-venv mount util-linux runc iptables iproute2 conntrack ethtool socat openssl mmdebstrap buildah busybox-static
# For cgo: the race detector, and NVIDIA's device plugin in the tests.
COMPILER_PACKAGES := gcc libc6-dev

# By default, apt also upgrades the packages that have a source package in common with a new one.
APT_INSTALL := apt-get install --no-install-recommends --no-upgrade -o APT::Get::Upgrade-By-Source-Package=false

define install_missing
	@missing=$$(for p in $(1); do dpkg-query -W -f='$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || echo $$p; done); \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" != 0 ]; then echo "these Debian packages are missing:" $$missing "- run 'make $@' as root" >&2; exit 1; fi; \
	apt-get update -q > /dev/null; \
	plan=$$($(APT_INSTALL) -s $$missing | grep '^Inst '); \
	old=$$(awk '$$3 ~ /^\[/ { print $$2 }' <<< "$$plan"); \
	if [ -n "$$old" ]; then echo "the missing packages need newer versions of" $$old "- run 'apt-get install --only-upgrade" $$old"', then 'make $@'" >&2; exit 1; fi; \
	echo "installing the Debian packages" $$(awk '{ print $$2 }' <<< "$$plan"); \
	DEBIAN_FRONTEND=noninteractive $(APT_INSTALL) -q -y $$missing > /dev/null
endef

.PHONY: deps
deps: ## install the missing Debian packages (needs root), and upgrade none
	$(call install_missing,$(DEBIAN_PACKAGES))

.PHONY: compiler
compiler: ## install the missing C compiler (needs root)
	$(call install_missing,$(COMPILER_PACKAGES))

# ---------------------------------------------------------------- checks without a cluster

.PHONY: format
format: venv ## format the code with ruff
	$(BIN)/ruff format $(PY)
	$(BIN)/ruff check --fix $(PY)

.PHONY: lint
lint: venv ## check format, lint rules, types and the direction of imports
	$(BIN)/ruff format --check $(PY)
	$(BIN)/ruff check $(PY)
	$(BIN)/python -m tools.english $(PY)
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyright
	@# From another folder: of a package in its own project pyright knows no installed form.
	cd docs && PYTHONPATH=$(CURDIR) $(CURDIR)/$(BIN)/pyright --pythonpath $(CURDIR)/$(BIN)/python --verifytypes drakit --ignoreexternal > /dev/null \
		|| { PYTHONPATH=$(CURDIR) $(CURDIR)/$(BIN)/pyright --pythonpath $(CURDIR)/$(BIN)/python --verifytypes drakit --ignoreexternal | grep -A2 error: >&2; exit 1; }
	@test -z "$$(ls operator/*.py 2>/dev/null)" || { echo "operator/ holds a module: it shadows the standard library" >&2; exit 1; }

.PHONY: proto
proto: venv ## generate the gRPC stubs from proto/
	$(BIN)/python tools/generate_proto.py

.PHONY: check-generated
check-generated: venv ## check that generated files are up to date
	$(BIN)/python tools/generate_proto.py --check
	$(BIN)/python -m tools.crds --check
	$(BIN)/python -m tools.reference --check
	$(BIN)/python -m tools.pictures --check

.PHONY: crds
crds: venv ## write the CustomResourceDefinitions of the chart from the models that read them
	$(BIN)/python -m tools.crds

.PHONY: reference
reference: venv ## write the generated pages of docs/reference
	$(BIN)/python -m tools.reference

.PHONY: pictures
pictures: venv ## draw the terminal pictures from their recordings
	$(BIN)/python -m tools.pictures

.PHONY: pictures-record
pictures-record: venv ## record the terminal pictures (needs cluster-up and cluster-images), and draw them
	$(BIN)/python -m tools.pictures.record
	$(BIN)/python -m tools.pictures

.PHONY: check-proto
check-proto: venv ## check that drakit.backend.v1 has only additions since the last release
	@# Before the first release, the commit in proto/BASELINE.
	@baseline=$$(git describe --tags --match 'v[0-9]*' --abbrev=0 2> /dev/null || cat proto/BASELINE); \
	git cat-file -e "$$baseline^{commit}" 2> /dev/null || { echo "This clone does not contain $$baseline: drakit.backend.v1 is not checked. To check it, run 'git fetch --unshallow --tags'"; exit 0; }; \
	old=$$(mktemp -d); trap 'rm -r "$$old"' EXIT; \
	git archive "$$baseline" proto/drakit_proto/backend | tar -x -C "$$old"; \
	$(BIN)/buf breaking proto --against "$$old/proto"

# The flags of e2e/images/go.py, so that Go compiles each package only once.
.PHONY: check-go
check-go: export CGO_ENABLED := 0
check-go: export GOFLAGS := -mod=readonly -buildvcs=false -trimpath -gcflags=all=-dwarf=false
check-go: ## check the Go modules (backend contract, example backend, helper of each release, the reader of metadata files, the tests' scheduler): format, vet, unit tests
	@if ! command -v go > /dev/null; then echo "Go is not installed: the programs in Go are not checked"; exit 0; fi; \
	for folder in proto/go examples/backend operator/cel e2e/metadata; do \
		unformed=$$(gofmt -l $$folder); if [ -n "$$unformed" ]; then echo "run gofmt -w on:" $$unformed >&2; exit 1; fi; \
		(cd $$folder && go vet ./... && go test ./...); \
	done; \
	cd operator/cel && for file in go-*.mod; do \
		flags="-modfile=$$file -tags=kubernetes$$(basename $$file .mod | sed s/go-//)"; \
		(go vet $$flags . && go test $$flags .); \
	done
	unformed=$$(gofmt -l tests/oracle); if [ -n "$$unformed" ]; then echo "run gofmt -w on:" $$unformed >&2; exit 1; fi

.PHONY: check-workflows
check-workflows: venv ## check the workflows of CI with actionlint (Go)
	@$(BIN)/python -m tools.audit workflows

# pip-audit has a separate environment, because drakit does not need its requirements.
AUDIT := .venv-audit

$(AUDIT)/.done: requirements/audit.txt
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/pip install --quiet --no-compile --require-hashes --requirement requirements/audit.txt
	touch $@

.PHONY: audit
audit: venv $(AUDIT)/.done ## search the pinned requirements and the Go modules for known vulnerabilities (needs their databases)
	@$(BIN)/python -m tools.audit vulnerabilities --pip-audit $(AUDIT)/bin/pip-audit $(ARGS)

.PHONY: check-race
check-race: compiler ## run the tests of the backend contract's Go module with the race detector (Go, a C compiler)
	cd proto/go && CGO_ENABLED=1 GOFLAGS="-trimpath -mod=readonly -buildvcs=false" go test -race ./...

.PHONY: unit
unit: venv ## run the unit tests, one process per core
	$(BIN)/pytest tests -m "not slow" --numprocesses auto --dist loadfile --no-loadscope-reorder --durations=15

.PHONY: check
check: lint check-generated check-proto check-go check-workflows unit ## run all checks that need no cluster

.PHONY: requirements
requirements: venv ## update the pinned requirements
	$(UV_COMPILE) --extra nodeplugin -o requirements/nodeplugin.txt pyproject.toml
	echo pip | $(UV_COMPILE) -o requirements/image.txt -
	$(UV_COMPILE) --extra operator -o requirements/operator.txt pyproject.toml
	$(UV_COMPILE) --extra kubectl -o requirements/kubectl.txt pyproject.toml
	$(UV_COMPILE) --extra nodeplugin --extra operator --extra kubectl --group dev -o requirements/dev.txt pyproject.toml
	$(UV_COMPILE) --group docs -o requirements/docs.txt
	$(UV_COMPILE) --group audit -o requirements/audit.txt
	echo 'nvidia-ml-py>=13,<14' | $(UV_COMPILE) -o examples/nvidia/requirements.txt -

# ---------------------------------------------------------------- documentation

# The site has a separate environment, because it does not need drakit's requirements.
DOCS := .venv-docs

$(DOCS)/.done: requirements/docs.txt
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "Python's venv module is missing: run 'make deps' as root, or install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --require-hashes --requirement requirements/docs.txt
	touch $@

.PHONY: docs
docs: $(DOCS)/.done ## build the site in build/docs/site, and check it
	PYTHONPATH=$(CURDIR) $(DOCS)/bin/python -m tools.site build --tag "$(TAG)"
	@PYTHONPATH=$(CURDIR) $(DOCS)/bin/python -m tools.site.words

.PHONY: docs-serve
docs-serve: $(DOCS)/.done ## serve the site on localhost:8000, and rebuild it after each change
	PYTHONPATH=$(CURDIR) $(DOCS)/bin/python -m tools.site serve $(ARGS)

.PHONY: docs-check-browser
docs-check-browser: docs ## load every page in Chromium, at two widths, in light and dark mode
	PYTHONPATH=$(CURDIR) $(DOCS)/bin/python -m tools.site.browser $(ARGS)

# Without the requirements of the build, so that they never run where a token can write.
.PHONY: docs-publish
docs-publish: ## add the built site to the branch gh-pages (TAG=vX.Y.Z of a release; PUSH=1)
	@rm -rf build/gh-pages && git worktree prune
	@git fetch -q origin gh-pages && git worktree add -q -B gh-pages build/gh-pages FETCH_HEAD \
		|| { git worktree add -q --detach build/gh-pages && git -C build/gh-pages checkout -q --orphan gh-pages && git -C build/gh-pages rm -q -r -f .; }
	PYTHONPATH=$(CURDIR) $(PYTHON) -m tools.site.versions build/gh-pages --tag "$(TAG)"
	@cd build/gh-pages && git add --all && { git diff --cached --quiet \
		|| git -c user.name=drakit -c user.email=docs@drakit.invalid commit -q -m "docs of $$(git -C $(CURDIR) describe --always --tags)"; }
	@if [ -n "$(PUSH)" ]; then git -C build/gh-pages push origin gh-pages; fi
	@git worktree remove --force build/gh-pages

# ---------------------------------------------------------------- clusters

.PHONY: cluster-programs
cluster-programs: deps venv ## build the binaries that clusters run (minutes on a new machine)
	$(BIN)/python -m e2e.cluster prepare

.PHONY: cluster-up
cluster-up: deps venv ## start a cluster: kind if a Docker engine is running, otherwise a local one (root)
	$(BIN)/python -m e2e.cluster up

.PHONY: cluster-down
cluster-down: venv ## stop the cluster, and remove its files
	$(BIN)/python -m e2e.cluster down

.PHONY: kubectl
kubectl: venv ## run kubectl against the cluster: make kubectl ARGS="get pods -A"
	@$(BIN)/python -m e2e.cluster kubectl -- $(ARGS)

.PHONY: cluster-env
cluster-env: venv ## eval "$(make -s cluster-env)": use the cluster with kubectl, kubectl drakit and helm
	@$(BIN)/python -m e2e.cluster env

.PHONY: cluster-images
cluster-images: deps venv ## build the images, and load them into the cluster
	$(BIN)/python -m e2e.images --cluster | grep '\.tar$$' | xargs $(BIN)/python -m e2e.cluster load-image

.PHONY: images
images: deps venv ## build the images that the cluster runs
	$(BIN)/python -m e2e.images

.PHONY: driver-image
driver-image: deps venv ## build the image IMAGE of the driver in FOLDER, and load it into the cluster
	@test -n "$(IMAGE)" && test -n "$(FOLDER)" || { echo "name both: make driver-image IMAGE=localhost/lamps-nodeplugin:0.1.0 FOLDER=../lamps" >&2; exit 1; }
	archive=$$($(BIN)/python -m e2e.images driver "$(IMAGE)" "$(FOLDER)") && $(BIN)/python -m e2e.cluster load-image --image "$(IMAGE)" "$$archive"

.PHONY: kind-up
kind-up: deps venv ## start a private Docker engine for CLUSTER=kind (needs root)
	$(BIN)/python -m e2e.cluster.kind up

.PHONY: kind-down
kind-down: venv ## stop the private Docker engine, and restore the state of the machine
	$(BIN)/python -m e2e.cluster.kind down

.PHONY: kind-image
kind-image: deps venv ## build kind's node image from Debian packages and Go modules (needs root)
	$(BIN)/python -m e2e.cluster.kind.image

.PHONY: image-context
image-context: venv ## write the context of `docker build` to build/image
	$(BIN)/python -m e2e.images context build/image

.PHONY: demo-plan
demo-plan: ## print what make demo installs and keeps
	@echo "make demo installs the Debian packages that are missing, Python packages in $(VENV), and Go modules in Go's cache."
	@echo "It keeps the built programs and images in ~/.cache/drakit. It upgrades no package."

.PHONY: demo
demo: demo-plan deps venv ## start a cluster, build the images, install the chart, run a pod with a device
	$(BIN)/python -m e2e.demo

# ---------------------------------------------------------------- releases

.PHONY: version
version: venv ## print the version in each format, or write it to all files that state it (SET=0.2.0.dev0)
	@$(BIN)/python -m tools.release.version $(if $(SET),--set "$(SET)") $(if $(TAG),--tag "$(TAG)")

.PHONY: release-dry-run
release-dry-run: deps venv ## build all files of a release in dist, without publishing them (root, Go; ARGS="--architecture amd64" for less)
	$(BIN)/python -m tools.release $(ARGS)

# Only for this processor: the test cannot run programs for another one.
.PHONY: e2e-release
e2e-release: cluster-programs ## build the files of a release for amd64, and test them on a cluster, without the sources
	$(BIN)/python -m tools.release --architecture amd64 --folder build/release
	DRAKIT_DIST=build/release $(BIN)/pytest e2e/test_dist.py -m e2e -s

.PHONY: wheel
wheel: venv ## write a wheel for this platform to build/wheel, with the programs of kubectl drakit (Go)
	@$(BIN)/python -m tools.wheel $(ARGS)

.PHONY: krew
krew: venv ## write archives and manifest of the krew plugin to build/krew (Go; URL= of the archives)
	@test -n "$(URL)" || { echo "name the folder of the archives: make krew URL=https://example.com/v0.1.0" >&2; exit 1; }
	$(BIN)/python -m tools.krew --url "$(URL)" $(ARGS)

.PHONY: go-proxy
go-proxy: venv ## write the Go module of the backend contract as a module proxy to build/go-proxy (ARGS="--version v0.1.0")
	@$(BIN)/python -m tools.go_proxy build/go-proxy $(ARGS)

# ---------------------------------------------------------------- tests

.PHONY: crash-matrix
crash-matrix: venv ## kill the node plugin at each of its steps, and check what remains
	$(BIN)/python -W error -m tests.crash

.PHONY: crash-quick
crash-quick: venv ## the same, with one variant of what follows each kill
	$(BIN)/python -W error -m tests.crash --variants 1

.PHONY: conformance
conformance: venv ## run the conformance kit on every included driver (Go for the example backend)
	$(BIN)/python -W error -m tests.conformance $(ARGS)

.PHONY: oracle
oracle: venv ## compare explanations with the scheduler, its allocator and its tables of tests (Go; ARGS="--kubernetes 1.36 --worlds 1000")
	$(BIN)/python -W error -m tests.oracle $(ARGS)
	$(BIN)/python -W error -m tests.oracle.fold
	$(BIN)/python -W error -m tests.oracle.tables

.PHONY: kubernetes-tables
kubernetes-tables: venv ## write Kubernetes' CEL selectors and feature gates, which the unit tests use (Go)
	$(BIN)/python -m tests.oracle.tables --write
	$(BIN)/python -m tests.oracle.gates

# `python -m e2e.outcomes keep NAME FILE` stores the results for the page about releases and runtimes.
E2E_RESULTS := build/e2e/$(or $(RUNTIME),$(KUBERNETES),default).xml

# Each process has its own cluster.
E2E_PROCESSES := 3

# Programs and images are built before the tests, because the tests' time limits do not include the builds.
.PHONY: e2e
e2e: compiler cluster-programs images ## run the tests on a real cluster (FEATURES=claims,explain selects features)
	$(BIN)/pytest e2e -m "e2e and not slow" --numprocesses $(E2E_PROCESSES) --dist loadfile --no-loadscope-reorder --durations=40 --durations-min=5 --junitxml=$(E2E_RESULTS) $(if $(FEATURES),--features=$(FEATURES))

.PHONY: e2e-docs
e2e-docs: cluster-programs images ## run the commands of the tested pages on a real cluster
	$(BIN)/pytest e2e/pages -m "e2e and not slow"

.PHONY: e2e-some
e2e-some: demo ## run the demo and the tests of devices, claims and faults, as `CLUSTER=kind make test` does
	$(BIN)/python -m e2e.cluster down
	$(BIN)/pytest e2e/test_devices.py e2e/test_claims.py e2e/test_faults.py -m "e2e and not slow"

.PHONY: upstream-e2e
upstream-e2e: deps venv ## run Kubernetes' own DRA tests with drakit (Go; FOCUS=regexp, KUBERNETES=1.37)
	$(BIN)/python -m e2e.upstream $(if $(KUBERNETES),--kubernetes "$(KUBERNETES)") $(if $(FOCUS),--focus "$(FOCUS)") $(ARGS)

.PHONY: upstream-quick
upstream-quick: cluster-programs images ## run a few of Kubernetes' own DRA tests with drakit (Go)
	$(BIN)/python -m e2e.upstream --quick $(if $(KUBERNETES),--kubernetes "$(KUBERNETES)")

# e2fsprogs for the small disk of the node plugin, libfaketime for its clock.
.PHONY: chaos
chaos: compiler cluster-programs images ## random faults on two nodes with 40 pods: nothing leaks, every pod runs (root; MINUTES=2 SEED=1)
	$(call install_missing,e2fsprogs libfaketime)
	CLUSTER=local $(BIN)/python -m e2e.chaos --minutes "$(or $(MINUTES),2)" --seed "$(or $(SEED),1)"

.PHONY: conformance-quick
conformance-quick: venv ## run the conformance kit on one driver of each kind
	$(BIN)/python -W error -m tests.conformance --quick

.PHONY: test
test: cluster-programs check conformance-quick crash-quick $(if $(filter kind,$(CLUSTER)),e2e-some,e2e) upstream-quick ## run all checks and tests that CI runs

.PHONY: test-all
test-all: cluster-programs images check check-race conformance crash-matrix ## run also the slow tests, and all tests on kind
	$(BIN)/pytest tests -m slow
	$(BIN)/python -W error -m tests.oracle.tables
	$(BIN)/pytest e2e -m e2e --junitxml=$(E2E_RESULTS)
	$(MAKE) chaos
	$(MAKE) e2e-release
	CLUSTER=local PYTHONPATH=$(CURDIR) $(BIN)/python -m bench.hostile
	$(BIN)/python -m e2e.upstream --faults
	CLUSTER=local $(BIN)/python -m e2e.upstream --kubernetes 1.36
	$(BIN)/python -m e2e.cluster.kind run -- $(BIN)/pytest e2e -m e2e
	$(BIN)/python -m e2e.cluster.kind run -- $(BIN)/python -m e2e.upstream

.PHONY: bench
bench: deps venv ## measure start-up, memory and the times of claims (ARGS=--quick for less)
	PYTHONPATH=$(CURDIR) $(BIN)/python -m bench $(ARGS)

.PHONY: hops
hops: venv ## count the functions that a prepare and a device change enter (ARGS=--list for their names)
	PYTHONPATH=$(CURDIR) $(BIN)/python -m bench.hops $(ARGS)

.PHONY: bench-operator
bench-operator: deps venv ## measure the operator and kubectl drakit in a large cluster (Go)
	PYTHONPATH=$(CURDIR) $(BIN)/python -m bench --only operator $(ARGS)

.PHONY: bench-admission
bench-admission: venv ## measure the operator's admission webhook: 200 checks of parameters per second on one core
	PYTHONPATH=$(CURDIR) $(BIN)/python -m bench.admission

.PHONY: hostile
hostile: deps venv ## attack the operator as a tenant can, under the chart's limits (Go; ARGS="--only cel")
	CLUSTER=local PYTHONPATH=$(CURDIR) $(BIN)/python -m bench.hostile $(ARGS)

.PHONY: clean
clean: ## remove the files that these targets create in this folder
	rm -rf $(VENV) $(DOCS) $(AUDIT) dist build .pytest_cache .ruff_cache .import_linter_cache .hypothesis

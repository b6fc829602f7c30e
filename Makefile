# make help lists the targets.
SHELL := /bin/bash -o pipefail
.DEFAULT_GOAL := help

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo v0.0.0-unknown)
# Readers of the version need a semantic one, so a build without a tag gets v0.0.0-COMMIT.
SEMVER  := $(if $(filter v%,$(VERSION)),$(VERSION),v0.0.0-$(VERSION))
LDFLAGS := -s -w -X k8s.io/component-base/version.gitVersion=$(SEMVER) -X k8s.io/client-go/pkg/version.gitVersion=$(SEMVER)
# gRPC's tracing uses html/template, which makes the linker keep every method of every type: 20 MB.
TAGS    := -tags=grpcnotrace
TOOLS   := .cache/tools
LINT    := $(TOOLS)/golangci-lint
VULN    := $(TOOLS)/govulncheck

# Results are not cached: go test does not know the programs that these tests build and start.
INTEGRATION := KUBE_CACHE_MUTATION_DETECTOR=true go test -count=1 -timeout 20m

# The image's name, without a tag, and its platforms.
IMAGE     ?= quartermaster
PLATFORMS ?= linux/amd64 linux/arm64
# The platforms of a release: nodes, for the image too, and where people work, for `kubectl quartermaster`.
RELEASED  := linux/amd64 linux/arm64 darwin/amd64 darwin/arm64 windows/amd64
VULNDB    ?= https://vuln.go.dev

.PHONY: help
help: ## Print this list.
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: run
run: ## Control plane, 2 simulated nodes (NODES=n), 2 managers (REPLICAS=n) and a sample; with KUBECONFIG=path as an argument, one manager on that cluster.
	@go build -o .cache/bin/run ./hack/run
	@exec .cache/bin/run --replicas=$(or $(REPLICAS),2) --nodes=$(or $(NODES),2) $(if $(filter command,$(origin KUBECONFIG)),--kubeconfig='$(KUBECONFIG)') $(if $(ARGS),-- $(ARGS))

.PHONY: controlplane
controlplane: ## Build kube-apiserver, kube-controller-manager, etcd and kubectl from pinned modules, once (minutes).
	@go run ./hack/cluster/controlplane/build

.PHONY: nodes
nodes: ## Build, after the control plane, what simulated nodes need: kube-scheduler, and kubelets from kwok (less than a minute).
	@go run ./hack/cluster/controlplane/build -nodes

.PHONY: build
build: ## Build bin/manager, stripped.
	CGO_ENABLED=0 go build $(TAGS) -trimpath -ldflags '$(LDFLAGS)' -o bin/manager ./cmd/manager
	@# If it can run a template, the linker keeps every method of every type: 20 MB of binary,
	@# 13 MiB of memory (docs/adr/0001).
	@! grep -aq 'text/template.(\*state).evalField' bin/manager || { echo 'bin/manager can run text/template'; exit 1; }

.PHONY: image
image: $(PLATFORMS:%=bin/%/manager) ## Build the image IMAGE (quartermaster) for PLATFORMS with podman, buildah or docker (TOOL=docker for this one).
	go run ./hack/image --tool='$(TOOL)' --image='$(IMAGE)' --version=$(SEMVER) \
	    --revision=$$(git rev-parse HEAD) --epoch=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct)} $(PLATFORMS)

# The binary depends only on the commit, the version and that of Go. What `go env -w` has set does not count.
BINARIES := $(patsubst %,bin/%/manager,$(sort $(PLATFORMS) $(RELEASED)))
.PHONY: $(BINARIES)
$(BINARIES): bin/%/manager:
	CGO_ENABLED=0 GOOS=$(*D) GOARCH=$(*F) GOAMD64=v1 GOARM64=v8.0 GOFLAGS=-trimpath \
	    go build $(TAGS) -buildvcs=false -ldflags '$(LDFLAGS)' -o $@ ./cmd/manager

.PHONY: chart
chart: ## Package the Helm chart as bin/quartermaster-VERSION.tgz, with its checksum and bill of materials beside it.
	cd hack/chart && go run . -version=$(SEMVER) -epoch=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct)} \
	    -out='$(CURDIR)/bin' '$(CURDIR)/deploy/helm/quartermaster'

.PHONY: sbom
sbom: build ## Write bin/manager.cdx.json, the bill of materials of bin/manager, in CycloneDX, and the licenses beside it.
	go run ./hack/sbom --version=$(SEMVER) bin/manager

.PHONY: release
release: ## Write the release VERSION=vX.Y.Z to dist/: binaries, image, chart, bills of materials, notes and checksums (minutes).
	go run ./hack/release --version='$(VERSION)' $(RELEASED)

.PHONY: test
test: test-unit test-integration ## Format check, vet, unit tests with the race detector, then the tests on a real control plane.

.PHONY: test-unit
test-unit: ## The part of test that needs no control plane.
	@files="$$(gofmt -l cmd pkg hack test examples)"; if [ -n "$$files" ]; then echo "not formatted:"; echo "$$files"; exit 1; fi
	go vet ./...
	go test -race -timeout 10m ./cmd/... ./pkg/... ./hack/... ./examples/...
	@# These have tests of memory, and of a mistake that is a data race.
	go test -timeout 10m ./pkg/informers ./pkg/controllers/controllertest
	cd hack/promql && go vet ./... && go test ./...
	@# A module of its own, as a user has one.
	cd examples/widget && go vet ./... && go test -race -timeout 10m ./...

.PHONY: test-integration
test-integration: controlplane ## The tests on a real kube-apiserver, etcd and kube-controller-manager, without what test-long runs.
	@# Three packages at a time, since they often wait, the longest first, which are last in the alphabet. faults runs alone,
	@# because its leases are short, and servers, because it measures.
	$(INTEGRATION) -skip '^TestLong' -p 3 $$(go list ./test/... | grep -v -e /faults -e /servers | sort -r)
	$(INTEGRATION) -skip '^Test(Long|Faults$$)' ./test/faults
	$(INTEGRATION) -skip '^TestLong' ./test/servers

.PHONY: test-chart
test-chart: controlplane ## The Helm chart, with Helm's own module: what it renders, and installing it.
	cd hack/chart && go vet ./... && $(INTEGRATION) ./...

.PHONY: test-long
test-long: nodes test-chart ## Long tests that rarely find something: simulated elections, mutants of the elector, TestLong..., faults.
	go test ./pkg/election -run '^TestSimulat(ion$$|ed)' -seeds=2000
	go test -timeout 10m ./pkg/election -run '^TestMutants$$' -parallel 2 -mutants=quick
	$(INTEGRATION) -run '^TestLong' -p 3 $$(grep -rl '^func TestLong' test | xargs -n 1 dirname | grep -v -e /faults -e /servers | sort -ru | sed 's,^,./,')
	$(INTEGRATION) -run '^Test(Long|Faults$$)' ./test/faults -faults=25
	@# One round of ten, which take an hour, most of it spent waiting for a lag to end.
	$(INTEGRATION) -run '^TestLong' -timeout 30m ./test/servers -rounds=1

.PHONY: lint
lint: $(LINT) ## golangci-lint, pinned in hack/tools.
	$(LINT) run ./...
	cd examples/widget && '$(CURDIR)/$(LINT)' run ./...
	cd hack/chart && '$(CURDIR)/$(LINT)' run ./...
	cd hack/nodes && '$(CURDIR)/$(LINT)' run ./...
	cd hack/promql && '$(CURDIR)/$(LINT)' run ./...

.PHONY: simulate
simulate: ## SEEDS (1000) runs of the simulated elections, with their rate; a violation prints its seed and history.
	go test ./pkg/election -run '^TestSimulat(ion$$|ed)' -v -timeout 0 -seeds=$(or $(SEEDS),1000)

.PHONY: mutants
mutants: ## Break each rule of the elector in turn; the simulation must notice it (minutes).
	go test ./pkg/election -run '^TestMutants$$' -v -timeout 60m -parallel 2 -mutants=all

.PHONY: faults
faults: ## FAULTS (1000) random faults on three real managers, judged by the audit log; SEED=n repeats a sequence.
	go test ./test/faults -run '^TestFaults$$' -v -timeout 0 -faults=$(or $(FAULTS),1000) $(if $(SEED),-seed=$(SEED))

.PHONY: bench
bench: ## Measure against the peers and write docs/bench (an hour and a half; ARGS='-run idle,reload' for a part).
	@go build -o .cache/bin/bench ./hack/bench
	@exec .cache/bin/bench $(ARGS)

.PHONY: verify
verify: $(VULN) ## Check generated files, goldens, go.mod and import direction; vulncheck if the database is reachable.
	go mod tidy -diff
	cd hack/chart && go mod tidy -diff
	cd hack/controlplane && go mod tidy -diff
	cd hack/crds && go mod tidy -diff
	cd hack/nodes && go mod tidy -diff
	cd hack/promql && go mod tidy -diff
	cd hack/tools && go mod tidy -diff
	cd hack/bench/peer && go mod tidy -diff
	cd examples/widget && go mod tidy -diff
	go run ./hack/generate -check
	@# What examples/widget generates, in a copy that is as deep, so that its replace directive holds.
	@rm -rf .cache/widget && mkdir -p .cache && cp -r examples/widget .cache/widget
	cd .cache/widget && go generate ./...
	diff -r examples/widget .cache/widget || { echo 'run make generate'; exit 1; }
	@rm -rf .cache/widget
	go test -run 'Golden|Imports|Manifests' ./pkg/app/... ./pkg/controllers/...
	go run ./hack/vulncheck --skip-offline --govulncheck=$(VULN) --db=$(VULNDB) ./cmd/manager

.PHONY: vulncheck
vulncheck: $(VULN) ## Look for known vulnerabilities that cmd/manager can reach, in VULNDB (https://vuln.go.dev, or file:///path).
	go run ./hack/vulncheck --govulncheck=$(VULN) --db=$(VULNDB) ./cmd/manager

.PHONY: generate
generate: ## Write deploy/rbac, the chart's roles, schema and README, the goldens and what examples/widget generates again.
	go run ./hack/generate
	cd examples/widget && go generate ./...
	go test -run Golden ./pkg/app -update

$(LINT): hack/tools/go.mod hack/tools/go.sum
	@echo "Building golangci-lint (a minute or two, once)"
	@mkdir -p $(TOOLS)
	cd hack/tools && go build -o ../../$(LINT) github.com/golangci/golangci-lint/v2/cmd/golangci-lint

$(VULN): hack/tools/go.mod hack/tools/go.sum
	@mkdir -p $(TOOLS)
	cd hack/tools && go build -o ../../$(VULN) golang.org/x/vuln/cmd/govulncheck

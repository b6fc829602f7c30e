# make help lists the targets and, from the end of this file, the variables that you may set.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo v0.0.0-unknown)
# Readers of the version need a semantic one, so a build without a tag gets v0.0.0-gCOMMIT.
SEMVER  := $(if $(filter v%,$(VERSION)),$(VERSION),v0.0.0-g$(VERSION))
LDFLAGS := -s -w -X k8s.io/component-base/version.gitVersion=$(SEMVER) -X k8s.io/client-go/pkg/version.gitVersion=$(SEMVER)
# gRPC's tracing uses html/template, which makes the linker keep every method of every type: 20 MB.
TAGS    := -tags=grpcnotrace
# The paths of the tools in Go's build cache, where all checkouts find them.
LINT    = "$$(go -C '$(CURDIR)/hack/tools' tool -n golangci-lint)"
VULN    = "$$(go -C '$(CURDIR)/hack/tools' tool -n govulncheck)"

# lint runs go vet; `go test` would run it again, with and without the race detector, on each package that a
# test depends on. Less garbage collection takes a fifth of the processor time from the tests.
TEST        := GOGC=400 go test -vet=off
# Go caches the results: test/internal/fleet reads what the started programs are built from.
INTEGRATION := CONTROLPLANE=1 KUBE_CACHE_MUTATION_DETECTOR=true $(TEST) -timeout 20m

# The image's name, without a tag, and its platforms.
IMAGE     ?= quartermaster
PLATFORMS ?= linux/amd64 linux/arm64
# The platforms of a release: nodes, for the image too, and where people work, for `kubectl quartermaster`.
RELEASED  := linux/amd64 linux/arm64 darwin/amd64 darwin/arm64 windows/amd64
VULNDB    ?= https://vuln.go.dev
# MODULES are all modules but the main one. LINTED_MODULES leaves out those that only pin versions, of programs
# and CRDs.
MODULES        = $(patsubst %/go.mod,%,$(shell git ls-files '*/go.mod'))
LINTED_MODULES = $(filter-out hack/controlplane hack/crds hack/tools,$(MODULES))

.PHONY: help
help: ## Print this list.
	@awk 'BEGIN {FS = ":.*## "} /^##@ / {printf "\n%s\n", substr($$0, 5)} /^[a-z0-9-]+:.*## / {printf "  %-16s %s\n", $$1, $$2} \
	    /^##= / {print "  " substr($$0, 5)}' $(MAKEFILE_LIST)

##@ Run

.PHONY: run
run: ## Start a control plane, 2 simulated nodes, 2 managers and a sample.
	@go build -o .cache/bin/run ./hack/run
	@exec .cache/bin/run --replicas=$(or $(REPLICAS),2) --nodes=$(or $(NODES),2) $(if $(ARGS),-- $(ARGS))

.PHONY: controlplane
controlplane: ## Build the control plane and kubectl from pinned modules, once (6 min).
	@go run ./hack/cluster/controlplane/build

##@ Build

.PHONY: build
build: ## Build bin/manager, stripped.
	CGO_ENABLED=0 go build $(TAGS) -trimpath -ldflags '$(LDFLAGS)' -o bin/manager ./cmd/manager
	@# If it can run a template, the linker keeps every method of every type: 20 MB of binary,
	@# 13 MiB of memory (docs/adr/0001).
	@! grep -aq 'text/template.(\*state).evalField' bin/manager || { echo 'bin/manager can run text/template'; exit 1; }

.PHONY: image
image: .cache/bin/release $(PLATFORMS:%=bin/%/manager) ## Write an image for PLATFORMS to bin/, as an OCI archive.
	.cache/bin/release --image='$(IMAGE)' --version=$(SEMVER) $(PLATFORMS)

# Without prerequisites: Go knows when it has to build.
.PHONY: .cache/bin/release
.cache/bin/release:
	go -C hack/release build -o '$(CURDIR)/$@' .

# The binary depends only on the commit, its version and Go's version, not on what `go env -w` has set.
BINARIES := $(patsubst %,bin/%/manager,$(sort $(PLATFORMS) $(RELEASED)))
.PHONY: $(BINARIES)
$(BINARIES): bin/%/manager:
	CGO_ENABLED=0 GOOS=$(*D) GOARCH=$(*F) GOAMD64=v1 GOARM64=v8.0 GOFLAGS=-trimpath \
	    go build $(TAGS) -buildvcs=false -ldflags '$(LDFLAGS)' -o $@ ./cmd/manager

.PHONY: chart
chart: ## Package the Helm chart to bin/, with a pinned Helm.
	GOFLAGS= SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct)} go -C hack/chart tool helm package \
	    --version=$(SEMVER:v%=%) --app-version=$(SEMVER) --destination='$(CURDIR)/bin' '$(CURDIR)/deploy/helm/quartermaster'

.PHONY: sbom
sbom: .cache/bin/release build ## Write bin/manager.cdx.json (CycloneDX), and the licenses beside it.
	.cache/bin/release --sbom=bin/manager --version=$(SEMVER)

.PHONY: site
site: ## Write the documentation to bin/site, as a site with a search.
	go -C hack/site run . --out='$(CURDIR)/bin/site' --version='$(VERSION)' $(ARGS)

##@ Release

.PHONY: release
release: .cache/bin/release ## Write the release VERSION=vX.Y.Z to dist/ (10 min).
	.cache/bin/release --version='$(VERSION)' $(RELEASED)

##@ Check

.PHONY: check
check: lint test-unit ## Run lint and test-unit, as before each commit (5 min).

.PHONY: test
test: test-unit test-integration ## Run the unit and integration tests (8 min).

.PHONY: test-unit
test-unit: ## Run the tests that need no control plane (3 min).
	$(TEST) -skip '^TestLong' ./cmd/... ./internal/... ./pkg/... ./hack/... ./examples/... ./test/internal/...
	@# These read files of other modules, of which Go's cache does not know.
	cd hack/promql && $(TEST) -count=1 ./...
	cd hack/release && $(TEST) -count=1 ./...
	cd hack/site && $(TEST) -count=1 ./...
	@# examples/widget is a module of its own, like a user's.
	cd examples/widget && $(TEST) ./...

.PHONY: test-integration
test-integration: controlplane ## Run the tests on a real control plane (5 min).
	@# Several packages at a time, since they often wait, and the longest one in two processes.
	@$(MAKE) -j3 test-federation-slow test-federation-rest test-others

# These take half of the time of the tests of federation, which use one host after the other.
SLOW_FEDERATION_TESTS := ^Test(DNSRecordsReachExternalDNS|ForbiddenTypeIsWrittenOff|ReplacedMemberGetsItsObjectsAgain|RestoredHostHoldsRemovals|WrittenOffRemovalIsMadeLater)$$
.PHONY: test-federation-slow test-federation-rest test-others
test-federation-slow: controlplane # Half of the time of the tests of federation.
	$(INTEGRATION) -run '$(SLOW_FEDERATION_TESTS)' ./test/federation
test-federation-rest: controlplane # The other half.
	$(INTEGRATION) -skip '^TestLong|$(SLOW_FEDERATION_TESTS)' ./test/federation
test-others: controlplane # All other tests on a real control plane, those that take longest first.
	@# An assignment, so that a package that go list cannot load is a failure.
	others=$$(go list ./test/... | grep -v -e /faults -e /federation -e /servers -e /internal/) && \
	$(INTEGRATION) -skip '^TestLong' -p 3 ./test/reload ./test/manager ./test/deploy $$others

.PHONY: test-chart
test-chart: controlplane ## Render the Helm chart, and install it on a real control plane.
	cd hack/chart && $(INTEGRATION) -count=1 ./...

.PHONY: test-e2e
test-e2e: ## Test an installation on your cluster: KUBECONFIG=path IMAGE=name:tag.
	@[ '$(origin KUBECONFIG) $(origin IMAGE)' = 'command line command line' ] || { echo "KUBECONFIG and IMAGE must be on make's command line, so that no cluster is drained by accident: make test-e2e KUBECONFIG=path IMAGE=name:tag"; exit 2; }
	E2E_KUBECONFIG='$(abspath $(KUBECONFIG))' E2E_IMAGE='$(IMAGE)' E2E_WORKLOAD='$(WORKLOAD)' \
	    $(TEST) -count=1 -timeout 1h -v -run '^TestOnACluster$$' ./test/e2e

.PHONY: test-race
test-race: ## Run the unit tests with the race detector.
	$(TEST) -race -timeout 20m -skip '^TestLong' ./cmd/... ./internal/... ./pkg/... ./hack/cluster/... ./examples/... ./test/internal/...
	cd examples/widget && $(TEST) -race ./...

.PHONY: test-election
test-election: ## Simulate 2,000 elections, and run the quick mutants.
	SEEDS=2000 MUTANTS=quick $(TEST) -timeout 20m -parallel 2 ./pkg/election

.PHONY: test-long
test-long: test-race test-chart test-election ## Run race, chart, election and long tests, faults (over 20 min).
	$(TEST) -run '^TestLong' ./pkg/...
	@# ./test/servers plays one round; all ten take an hour. ./test/faults has short leases, so it runs alone, with
	@# a new seed each time.
	@# In reverse order, since servers and scaleschedule take longest.
	RACE=1 ROUNDS=1 $(INTEGRATION) -timeout 90m -p 4 $$(go list ./test/... | grep -v /faults | sort -r)
	SEED=0 FAULTS=25 $(INTEGRATION) ./test/faults

.PHONY: fuzz
fuzz: ## Fuzz each Fuzz function for FUZZTIME.
	@for package in $$(git grep -l '^func Fuzz' -- '*_test.go' | xargs -n1 dirname | sort -u); do \
	    listed=$$(go test -vet=off -list '^Fuzz' ./$$package) || exit 1; \
	    for function in $$(echo "$$listed" | grep '^Fuzz'); do \
	        go test -vet=off -run '^$$' -fuzz "^$$function$$" -fuzztime $(or $(FUZZTIME),1m) ./$$package; done; done

.PHONY: lint
lint: ## Run golangci-lint, pinned in hack/tools: format, vet, imports and more.
	@lint=$(LINT); status=0; for module in . $(LINTED_MODULES); do \
	    echo "golangci-lint in $$module"; (cd $$module; "$$lint" run ./...) || status=1; done; exit $$status

.PHONY: fmt
fmt: ## Format every Go file as lint wants it.
	$(LINT) fmt cmd internal pkg hack test examples

.PHONY: verify
verify: ## Check go.mod, generated files, client-go versions and vulnerabilities (1 min).
	@for module in . $(MODULES); do echo "go mod tidy in $$module"; go -C $$module mod tidy -diff; done
	@# KubeFed's own tests and the control plane need versions of their own.
	@[ "$$(git ls-files '*go.mod' ':!hack/controlplane' ':!hack/kubefed' | xargs grep -ho 'k8s.io/client-go v[^ ]*' | sort -u | wc -l)" = 1 ] || \
	    { echo 'the go.mod files require several versions of k8s.io/client-go'; exit 1; }
	go run ./hack/generate --check
	@$(MAKE) --no-print-directory vulncheck OPTIONAL=1

.PHONY: vulncheck
vulncheck: ## Look for known vulnerabilities that cmd/manager can reach.
	@vuln=$(VULN); if [ -n '$(OPTIONAL)' ] && ! "$$vuln" -mode=query -format=json -db='$(VULNDB)' stdlib@v1.26.0 >/dev/null; then \
	    echo 'WARNING: govulncheck was SKIPPED: $(VULNDB) cannot be read. VULNDB=file:///path is for a copy.'; \
	    else "$$vuln" -db='$(VULNDB)' ./cmd/manager; fi

##@ Election and federation

.PHONY: simulate
simulate: ## Simulate SEEDS elections; a violation prints its seed and history.
	SEEDS=$(or $(SEEDS),1000) $(TEST) ./pkg/election -run '^TestSimulat(ion$$|ed)' -v -timeout 0

.PHONY: mutants
mutants: ## Break each rule of the elector; the simulation must notice (minutes).
	MUTANTS=all $(TEST) ./pkg/election -run '^TestMutants$$' -v -timeout 60m -parallel 2

.PHONY: faults
faults: controlplane ## Play FAULTS random faults on three real managers, judged by the audit log.
	FAULTS=$(or $(FAULTS),1000) SEED=$(or $(SEED),1) $(TEST) ./test/faults -run '^TestFaultsLetNobodyWriteWithoutLeading$$' -v -timeout 0 -count=1

.PHONY: kubefed
kubefed: controlplane ## Run KubeFed's own tests, and the migration from it and back (30 min).
	KUBEFED=$(or $(KUBEFED),3) $(TEST) ./test/federation -run '^TestLongKubeFed' -v -timeout 0 -count=1

##@ Measure and generate

.PHONY: bench
bench: ## Measure against the peers, write and draw docs/bench (90 min).
	@go build -o .cache/bin/bench ./hack/bench
	@.cache/bin/bench $(ARGS)
	@go -C hack/plot run . '$(CURDIR)/docs/bench'

.PHONY: generate
generate: ## Rewrite generated files: roles, chart, goldens, metrics, pictures, widget.
	$(TEST) -run Golden ./pkg/app -update
	go run ./hack/generate
	cd examples/widget && go generate ./...
	go -C hack/plot run . '$(CURDIR)/docs/bench'

.PHONY: clean
clean: ## Remove what make writes in this folder, not ~/.cache/quartermaster.
	rm -rf .cache .run bin dist

##@ Variables: make TARGET NAME=value
##= VERSION          build, image, chart, sbom, site, release: git describe
##= IMAGE            image: the name without a tag, quartermaster; test-e2e: name:tag
##= PLATFORMS        image: linux/amd64 linux/arm64
##= REPLICAS, NODES  run: 2 managers, 2 simulated nodes
##= ARGS             run: flags of the managers; bench: flags, such as -run idle; site: flags
##= KUBECONFIG       test-e2e: of an administrator, no default
##= WORKLOAD         test-e2e: an image with a shell, busybox from registry.k8s.io
##= SEEDS            simulate: 1000
##= FAULTS, SEED     faults: 1000 faults, of the sequence 1
##= FUZZTIME         fuzz: 1m for each function
##= KUBEFED          kubefed: 3 runs of each test
##= VULNDB           vulncheck, verify: https://vuln.go.dev, or file:///path of a copy
##= OPTIONAL         vulncheck: 1 skips an unreadable VULNDB, as verify does

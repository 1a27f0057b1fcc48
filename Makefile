SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
export PATH := $(PATH):/usr/local/sbin:/usr/sbin:/sbin

# Tools run at the versions pinned here.
GOFUMPT     = go run mvdan.cc/gofumpt@v0.12.0
STATICCHECK = go run honnef.co/go/tools/cmd/staticcheck@v0.8.2
GOLANGCI    = go run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
ACTIONLINT  = go run github.com/rhysd/actionlint/cmd/actionlint@v1.7.11
GOVULNCHECK = go run golang.org/x/vuln/cmd/govulncheck@v1.8.0

ARCHS   = amd64 arm arm64 ppc64le s390x
# The tag, or the output of git describe after it; without a tag a Go pseudo-version. Git is asked once, by what needs it.
VERSION = $(eval VERSION := $(shell git describe --tags --match 'v[0-9]*' --dirty 2>/dev/null || \
	{ TZ=UTC git log -1 --abbrev=12 --date=format-local:%Y%m%d%H%M%S --format=v0.0.0-%cd-%h && \
	{ git diff --quiet HEAD || echo -dirty; }; } 2>/dev/null | tr -d '\n' | grep . || echo devel))$(VERSION)
COMMIT  = $(eval COMMIT := $(shell git describe --always --abbrev=40 --exclude='*' --dirty 2>/dev/null))$(COMMIT)
# Stamped by the linker: what Go itself stamps depends on GOFLAGS and the kind of checkout.
# HTTP/2 needs TLS, which the agent does not serve; without it the program is 0.5 MiB smaller.
TAGS     = nethttpomithttp2
# net/http links TLS, and the metrics link protobuf, neither of which the agent speaks. Without inlining they are 0.35 MB
# smaller, so that the program has at most 11 MiB.
UNUSED   = crypto/... google.golang.org/protobuf/...
BUILD    = CGO_ENABLED=0 go build $(UNUSED:%=-gcflags=%=-l) -trimpath -buildvcs=false -tags $(TAGS) -ldflags '-s -w -funcalign=16 -X main.version=$(VERSION) -X main.commit=$(COMMIT)'

# With 1, a kernel test that cannot run fails; with 0 it is skipped.
REQUIRE_KERNEL ?= 1
export REQUIRE_KERNEL
# Packages whose tests have the flag -update. The first ones write what others read.
GOLDEN = ./config/ ./nft/ $(filter-out ./config/ ./nft/,$(sort $(dir $(shell grep -rls 'Bool."update"' --include='*_test.go' .))))
# A table of measured connections takes minutes: make golden LONG=1.
MEASURED = TestEachGetsItsSourceAddressNextToOtherPrograms
FUZZTIME ?= 10s
# LONG=1 runs the tests at full length, which takes hours; ci-full sets it.
TIMEOUT = $(if $(LONG),90m,20m)

include manifests/manifests.mk cmd/bench/bench.mk cmd/stress/stress.mk

.PHONY: help
help: ## develop: Print the targets
	@for group in use test release develop; do \
		echo "$$group"; \
		sed -nE "s/^([a-z0-9-]+):.*## $$group: (.*)/\1|\2/p" $(MAKEFILE_LIST) | \
			awk -F '|' '{ printf "  %-18s %s\n", $$1, $$2 }'; \
	done

.PHONY: build
build: ## use: Build bin/nft-masq-agent for this machine
	@echo "building bin/nft-masq-agent $(VERSION)"
	@$(BUILD) -o bin/nft-masq-agent ./cmd/nft-masq-agent

.PHONY: all-build
all-build: $(ARCHS:%=bin/linux_%/nft-masq-agent) ## release: Build bin/linux_ARCH/nft-masq-agent for each architecture

.PHONY: FORCE
bin/linux_%/nft-masq-agent: FORCE
	@echo "building $@ $(VERSION)"
	@GOOS=linux GOARCH=$* $(BUILD) -o $@ ./cmd/nft-masq-agent

# With the flags of the program that tests start, so that each dependency is compiled once. Lint vets.
# Two packages at a time, so that the largest one has a half of the machine at least, and twelve tests of each, because
# many wait. Those that start the program share one.
GOTEST = CGO_ENABLED=0 go test -tags $(TAGS) -vet=off -count=1 -p 2 -parallel 12

.PHONY: test
test: deps ## test: Run all tests: units, kernel and binary (root, or user namespaces)
	CGO_ENABLED=0 go build -tags $(TAGS) -buildvcs=false -ldflags='-s -w' -o bin/test/nft-masq-agent ./cmd/nft-masq-agent
	NFT_MASQ_AGENT_TEST_PROGRAM=$(CURDIR)/bin/test/nft-masq-agent $(GOTEST) -timeout $(TIMEOUT) ./...

# As many busy processes as CI runners have at their worst. Each ends after an hour, whatever becomes of make.
.PHONY: test-busy
test-busy: export LONG =
test-busy: deps ## test: Run all tests next to 16 busy processes
	@$(GOTEST) -run '^$$' ./... >/dev/null; \
	pids=; trap 'kill $$pids 2>/dev/null || true' EXIT; \
	for n in {1..16}; do timeout 3600 sh -c 'while :; do :; done' & pids="$$pids $$!"; done; \
	$(GOTEST) -timeout 60m ./...

# Packages with tests that need no kernel. Those that need one are skipped: the emulator of a
# program, without a machine, does not translate nf_tables.
PURE    = ./config $(addprefix ./nft,/ /conntrack /judge /native /nfnetlink /xtables)
# Without capabilities, and without the namespace in which others would have them.
EMULATE = $(if $(filter 0,$(shell id -u)),setpriv --bounding-set=-all) qemu-s390x-static

.PHONY: test-s390x
test-s390x: export REQUIRE_KERNEL = 0
test-s390x: export NFTTEST_IN_USER_NAMESPACE = 1
test-s390x: ## test: Run short tests without a kernel on s390x, which is big-endian, in qemu-user
	$(call need,qemu-s390x-static:qemu-user-static)
	CGO_ENABLED=0 GOARCH=s390x go test -short -count=1 -timeout $(TIMEOUT) -exec '$(EMULATE)' $(PURE)

.PHONY: test-race
test-race: deps ## test: Run all tests under the race detector (needs a C compiler)
	CGO_ENABLED=1 go test -race -count=1 -timeout $(TIMEOUT) ./...

# For 32 bits, github.com/google/nftables does not compile, which cmd/stress needs.
.PHONY: lint
lint: ## develop: Check formatting and run the linters
	@unformatted="$$($(GOFUMPT) -l .)"; \
	if [ -n "$$unformatted" ]; then echo "not formatted by gofumpt:"; echo "$$unformatted"; exit 1; fi
	go vet ./...
	GOARCH=arm go vet ./nft/... ./config/... ./watch/... ./cmd/nft-masq-agent/...
	$(STATICCHECK) ./...
	$(GOLANGCI) run ./...
	$(ACTIONLINT) -shellcheck=

.PHONY: vuln
vuln: $(VULNDB) ## develop: Check for known vulnerabilities (VULNDB=bin/vulndb takes the database from a Go module)
	$(GOVULNCHECK) $(VULNDB:%=-db 'file://$(CURDIR)/%') -tags $(TAGS) ./cmd/nft-masq-agent

VULNMODULE = golang.org/x/vulndb
bin/vulndb: FORCE
	go mod download $(VULNMODULE)@latest
	go run $(VULNMODULE)/cmd/indexdb@latest -vulns "$$(go list -m -f '{{.Dir}}' $(VULNMODULE)@latest)/data/osv" -out $@

.PHONY: golden
golden: deps ## develop: Regenerate golden files (review the diff)
	@for dir in $(GOLDEN); do \
		tests=$$(awk '/^func / { test = "" } /^func Test/ { test = $$2; sub(/[(].*/, "", test) } \
			/[*]update|[^a-z]golden[(]t,/ && test != "" && (test != "$(MEASURED)" || "$(LONG)" != "") { print test }' $$dir*_test.go | \
			sort -u | paste -sd '|'); \
		$(GOTEST) -run "^($$tests)$$" $$dir -args -update || exit 1; \
	done

.PHONY: fuzz
fuzz: ## test: Fuzz each fuzz target for FUZZTIME (10s)
	@for pkg in $$(go list ./...); do \
		for target in $$(go test -list '^Fuzz' "$$pkg" | sed -n '/^Fuzz/p'); do \
			echo "$$pkg $$target"; \
			go test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) "$$pkg"; \
		done; \
	done

MUTATE  ?= -seed 1 -n 60
MUTATED ?= nft nft/native nft/xtables nft/nftrace nft/others nft/conntrack config

.PHONY: mutate
mutate: deps ## develop: Show what fast tests see of small changes (about an hour; MUTATE='-seed 2 -n 20' MUTATED=nft/conntrack)
	nice -n 5 go run ./nft/nfttest/mutate $(MUTATE) $(MUTATED)

.PHONY: demo
demo: ## use: Show the agent at work in separate network namespaces
	$(call need,$(DEMO_DEPS))
	@$(BUILD) -o bin/nft-masq-agent ./cmd/nft-masq-agent
	@go run ./cmd/demo bin/nft-masq-agent manifests/agent-config/config

.PHONY: run
run: build ## use: Run the agent on this machine: make run CONFIG=FILE [ARGS='--flag …']
	mkdir -p /run/nft-masq-agent
	bin/nft-masq-agent run --probe-socket /run/nft-masq-agent/probe.sock $(if $(CONFIG),--config '$(CONFIG)') \
		$$(test -t 1 && echo --log-format=text) $(ARGS)

.PHONY: reproducible
reproducible: ## release: Build the last commit in two directories and compare
	@dir="$$(mktemp -d)"; trap 'rm -rf "$$dir"' EXIT; \
	for clone in a another/one; do \
		git clone -q --no-hardlinks . "$$dir/$$clone"; $(MAKE) -C "$$dir/$$clone" build >/dev/null; \
	done; \
	cmp "$$dir"/{a,another/one}/bin/nft-masq-agent; \
	echo "identical: $$(sha256sum <"$$dir/a/bin/nft-masq-agent")"

.PHONY: ci-full
ci-full: export LONG = 1
ci-full: lint all-build manifests-check reproducible fuzz container-test reproducible-image release-test promtool-test systemd-test schema-test install-test test-cluster soak test-race test-busy test-s390x test test-nft ## test: Run all checks, including the slow ones

.PHONY: version
version: ## release: Print the version that a build is stamped with
	@echo '$(VERSION)'

.PHONY: clean
clean: ## develop: Remove build results
	rm -rf bin dist

# Looks for the programs, and installs the packages of those that are missing: PROGRAM:PACKAGE...
define need
	@missing=; \
	for each in $(1); do command -v "$${each%:*}" >/dev/null || missing="$$missing $${each#*:}"; done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing the packages$$missing" >&2; \
		apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $$missing >/dev/null; \
	else \
		echo "missing: run apt-get install$$missing" >&2; exit 1; \
	fi
endef
DEMO_DEPS = nft:nftables iptables-nft:iptables

# The programs with which the kernel tests compare the agent.
.PHONY: deps
deps:
	$(call need,$(DEMO_DEPS))

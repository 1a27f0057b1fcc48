.PHONY: stress
stress: build deps ## test: Check that no update lets a wrong packet out (minutes; STRESS='--each 1m …')
	go run ./cmd/stress --agent bin/nft-masq-agent $(STRESS)

SOAK ?= 10m

.PHONY: soak
soak: deps ## test: Attack config, rules, log and port of an agent at random for SOAK (10m), within its memory limit
	go test -count=1 -timeout 60m -v -run '^TestRandomAttacksEndInTheRenderedState$$' ./cmd/nft-masq-agent -args -soak $(SOAK)

.PHONY: test-kernels
test-kernels: ## test: Run the tests and stress on other kernels in qemu (KERNELS='5.10 6.1 6.12 6.18 7.2')
	.ci/test-kernels 'tests stress' $(or $(KERNELS),5.10 6.1 6.12 6.18 7.2)

# Not each kernel has ip_vs; this one has.
.PHONY: test-ipvs
test-ipvs: ## test: Trace connections through kube-proxy in mode ipvs, in qemu
	$(call need,openssl:openssl)
	.ci/test-kernels ipvs 6.12

# 0.9.8, 1.0.6, 1.1.3, and the newest.
.PHONY: test-nft
test-nft: export REQUIRE_KERNEL = 1
test-nft: ## test: Check that the nft of other releases of Debian lists the rules, and loads them again
	.ci/nft-versions bullseye bookworm trixie sid

# For 32 bits, github.com/google/nftables does not compile, which most of the tests need.
.PHONY: test-arch
test-arch: ## test: Run short tests and a scenario on other architectures in qemu
	.ci/test-kernels 'short scenario' s390x/6.1 arm64/6.1
	.ci/test-kernels scenario armhf/6.1 ppc64el/6.1

.PHONY: stress
stress: build deps ## Check that no update lets a wrong packet out (minutes; STRESS='--each 1m …')
	go run ./cmd/stress --agent bin/nft-masq-agent $(STRESS)

SOAK ?= 10m

.PHONY: soak
soak: deps ## Attack config, rules, log and port of an agent at random for SOAK (10m), within its memory limit
	go test -count=1 -timeout 60m -v -run '^TestRandomAttacksEndInTheRenderedState$$' ./cmd/nft-masq-agent -args -soak $(SOAK)

.PHONY: test-kernels
test-kernels: deps ## Run kernel tests and stress on other kernels in qemu (KERNELS='5.10 6.1 6.12 6.18 7.2')
	.ci/test-kernels $(KERNELS)

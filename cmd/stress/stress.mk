.PHONY: stress
stress: build deps ## Prove that no update lets a wrong packet out (minutes; STRESS='--each 1m …')
	go run ./cmd/stress --agent bin/nft-masq-agent $(STRESS)

.PHONY: test-kernels
test-kernels: deps ## Run kernel tests and stress on other kernels in qemu (KERNELS='5.10 6.1 6.12 6.18 7.2')
	.ci/test-kernels $(KERNELS)

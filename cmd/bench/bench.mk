.PHONY: bench
bench: deps build ## develop: Measure the agent against nft, iptables and the kernel, as root, in under 15 minutes: make bench [ARGS='-o json']
	@go run ./cmd/bench -agent bin/nft-masq-agent $(ARGS)

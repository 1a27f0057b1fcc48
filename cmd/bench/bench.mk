.PHONY: bench
bench: deps build ## develop: Measure the agent against nft, iptables and the kernel, as root, in half an hour: make bench [ARGS='-only swap']
	$(call need,strace:strace)
	@go run ./cmd/bench -agent bin/nft-masq-agent $(ARGS)

.PHONY: plots
plots: ## develop: Draw the plots of cmd/bench/results.txt, into which a run of bench goes
	$(call need,gnuplot:gnuplot-nox)
	gnuplot cmd/bench/plots.gp
	cd cmd/bench && sha256sum results.txt plots.gp *.svg >plots.sha256

.PHONY: dashboard
dashboard: deps build bin/prometheus ## develop: Draw manifests/grafana/dashboard.svg, with the metrics of two agents that run for it (a minute and a half)
	go run ./cmd/bench/dashboard bin/nft-masq-agent bin/prometheus manifests/grafana/dashboard.json manifests/grafana/dashboard.svg

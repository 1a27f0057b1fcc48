package neighbors

import (
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

// BenchmarkStartWithFiftyThousandForeignRules measures what an agent does at its
// start on a node with that many foreign rules in the table nat.
func BenchmarkStartWithFiftyThousandForeignRules(b *testing.B) {
	want := cases.Load(b, "default").Compile(nft.ModeNFTables)
	for name, rules := range map[string]string{
		"pods":        podRules(50_000 / 3),
		"one-chain":   flatRules("POSTROUTING", 50_000),
		"unreachable": flatRules("PREROUTING", 50_000),
	} {
		b.Run(name, func(b *testing.B) {
			ns := nfttest.NewNS(b, "node")
			nfttest.Run(b, ns, rules, "iptables-nft-restore")
			var took float64
			for b.Loop() {
				k := open(b, ns)
				before := processorTime(b)
				_, err := k.Apply(b.Context(), want, layout.Everything)
				must(b, err)
				conflicts := others(b, k, want).Conflicts
				took += processorTime(b) - before
				b.ReportMetric(float64(len(conflicts)), "conflicts")
				_, err = k.Cleanup(b.Context(), kernel.Ours)
				must(b, err)
			}
			b.ReportMetric(took/float64(b.N), "cpu-s/op")
		})
	}
}

// processorTime returns the CPU time of the process in seconds.
func processorTime(b *testing.B) float64 {
	b.Helper()
	var r unix.Rusage
	must(b, unix.Getrusage(unix.RUSAGE_SELF, &r))
	return float64(r.Utime.Nano()+r.Stime.Nano()) / 1e9
}

// podRules are those of the CNI plugin bridge: a chain, a jump and two rules per pod.
func podRules(pods int) string {
	var chains, rules strings.Builder
	for i := range pods {
		chain := fmt.Sprintf("CNI-%024x", i)
		fmt.Fprintf(&chains, ":%s - [0:0]\n", chain)
		fmt.Fprintf(&rules, "-A POSTROUTING -s 10.%d.%d.%d/32 -m comment --comment \"pod %d\" -j %s\n", 100+i>>16, i>>8&255,
			i&255, i, chain)
		fmt.Fprintf(&rules, "-A %s -d 10.96.0.0/12 -m comment --comment \"pod %d\" -j ACCEPT\n", chain, i)
		fmt.Fprintf(&rules, "-A %s ! -d 224.0.0.0/4 -m comment --comment \"pod %d\" -j MASQUERADE\n", chain, i)
	}
	return "*nat\n" + chains.String() + rules.String() + "COMMIT\n"
}

// flatRules are rules of one chain, each for a different destination.
func flatRules(chain string, n int) string {
	var rules strings.Builder
	for i := range n {
		fmt.Fprintf(&rules, "-A %s -d 11.%d.%d.%d/32 -m comment --comment \"rule %d\" -j RETURN\n", chain, i>>16, i>>8&255,
			i&255, i)
	}
	if chain == "POSTROUTING" {
		rules.WriteString("-A POSTROUTING -s 10.0.0.0/8 -j MASQUERADE\n")
	}
	return "*nat\n" + rules.String() + "COMMIT\n"
}

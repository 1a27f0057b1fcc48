package answer

import (
	"flag"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/neighbors"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/loop"
	"nft-masq-agent/nft/routes"
)

var update = flag.Bool("update", false, "regenerate testdata/policies.txt")

// testdata/policies.txt has configs, and what is said about them: with "pods", the pod CIDRs; with "node", the addresses of
// a node; with "interfaces", those of a node, with MASTER=KIND after a slash.
func TestPoliciesAreJudgedAsTheirRowsSay(t *testing.T) {
	nfttest.Golden(t, "testdata/policies.txt", *update, func(t *testing.T, _, text string) string {
		var file strings.Builder
		of := map[string]string{}
		for line := range strings.Lines(text) {
			switch word, rest, _ := strings.Cut(strings.TrimSpace(line), " "); word {
			case "pods", "node", "interfaces":
				of[word] = rest
			default:
				file.WriteString(line)
			}
		}
		b := nft.Build(config.Defaults{}, nft.Options{Layout: native.Layout{}},
			config.Source{Name: "c", Data: []byte(file.String())})
		if err := b.Problems.Err(); err != nil {
			t.Fatal(err)
		}
		var pods []netip.Prefix
		for p := range strings.FieldsSeq(of["pods"]) {
			pods = append(pods, netip.MustParsePrefix(p))
		}
		var interfaces []routes.Interface
		for i := range strings.FieldsSeq(of["interfaces"]) {
			name, master, _ := strings.Cut(i, "/")
			master, kind, _ := strings.Cut(master, "=")
			interfaces = append(interfaces, routes.Interface{Name: name, Master: master, MasterKind: kind})
		}
		found := Lint(b.Ruleset.Policy, pods)
		if interfaces != nil {
			found = append(found, Interfaces(neighbors.AbsentInterfaces(b.Ruleset.Policy, interfaces))...)
		}
		var said strings.Builder
		for _, p := range found {
			fmt.Fprintf(&said, "%s %s: %s\n", p.Level, p.ID, p.Error())
		}
		if of["node"] != "" {
			for _, r := range NodeSNAT(b.Ruleset.Policy.On(loop.Addresses(of["node"]))) {
				fmt.Fprintln(&said, r)
			}
		}
		return text + nfttest.Marked(said.String())
	})
}

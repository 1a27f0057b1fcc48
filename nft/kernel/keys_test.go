package kernel

import (
	"net/netip"
	"strings"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

// checkEnforced sends a packet next to a program that masquerades everything after the chain
// that enforces exemptions.
func (w *wire) checkEnforced(t *testing.T, p nft.Policy, packet cases.Packet, why string) {
	t.Helper()
	conn := packet.Connection()
	if conn.FromNode {
		return
	}
	s := w.send(t, packet)
	if kept, want := s.Sent.Addr() == s.Seen.Addr(), judge.Enforced(p, conn); kept != want {
		t.Errorf("%s keeps its address %t, want %t: compileEnforcement, or judge.Enforced, is wrong about\n%s",
			packet.Line, kept, want, why)
	}
}

const masqueradesEverything = "table inet other { chain c { type nat hook postrouting priority 99; masquerade; }; }"

// What pods send to exempt destinations keeps its address, whatever keys the config has; nothing
// else does.
func TestChainThatEnforcesKnowsEachKey(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	nfttest.Require(t, "nft")
	w := newWire(t)
	k := open(t, w.Node)
	nfttest.NFT(t, w.Node, masqueradesEverything, "-f", "-")
	hosts := [][2]string{
		{"10.244.1.2", "10.9.0.9"},
		{"10.244.1.2", "10.8.0.9"},
		{"10.244.1.2", "203.0.113.9"},
		{"10.244.1.2", "198.51.100.9"},
		{"10.244.9.7", "10.9.0.9"},
		{"10.7.0.7", "10.9.0.9"},
		{"fd00:10:244:1::2", "2001:db8:1::1"},
	}
	cases.EachKey(t, func(t *testing.T, key cases.Key) {
		for _, text := range key.Files() {
			if !strings.Contains(text, config.KeyEnforceNonMasquerade) {
				text += config.KeyEnforceNonMasquerade + ": true\n"
			}
			b := nft.Build(config.Defaults{}, enforcingOptions(), config.Source{Name: "f", Data: []byte(text)})
			if b.Ruleset == nil {
				t.Fatal(b.Problems)
			}
			apply(t, k, *b.Ruleset, everything)
			for _, host := range hosts {
				w.checkEnforced(t, b.Ruleset.Policy, cases.Packet{
					Line: strings.Join(host[:], " "), Proto: nfttest.UDP,
					Src: netip.MustParseAddr(host[0]), Dst: netip.MustParseAddr(host[1]),
				}, text)
			}
		}
	})
}

package main

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/nfttest"
)

// compared calls a task with the comparison of connections with a policy, in the namespace of the node.
func (n trafficNode) compared(p nft.Policy, task func(*conntrack.Comparison) error) {
	n.t.Helper()
	n.check(n.NS.Do(func() error {
		node, err := conntrack.ReadNode()
		if err != nil {
			return err
		}
		return task(conntrack.NewComparison(p, node))
	}))
}

// noted notes the connections that contradict a policy.
func (n trafficNode) noted(p nft.Policy) (h conntrack.History) {
	n.t.Helper()
	n.compared(p, func(c *conntrack.Comparison) (err error) {
		h.Earlier, err = conntrack.Open().Note(n.t.Context(), c, conntrack.Past{})
		return err
	})
	return h
}

// gathered is the evidence about a policy.
func (n trafficNode) gathered(p nft.Policy, h conntrack.History, questions ...conntrack.Question) (e conntrack.Evidence) {
	n.t.Helper()
	n.compared(p, func(c *conntrack.Comparison) (err error) {
		e, err = conntrack.Open().Gather(n.t.Context(), c, h, questions...)
		return err
	})
	return e
}

// A sending is a packet, and what the far end saw.
type sending struct {
	question conntrack.Question
	nfttest.Sighting
	asked, verdict string // the destination, and what the policy says
}

// sendNext sends packets of UDP to addresses, and returns those that arrived.
func (n trafficNode) sendNext(p nft.Policy, addresses []string) (all []sending) {
	n.t.Helper()
	for i, address := range addresses {
		dst := netip.AddrPortFrom(netip.MustParseAddr(address), uint16(4000+i))
		src := n.top.PodV4
		if dst.Addr().Is6() {
			src = n.top.PodV6
		}
		flow := nfttest.Flow{
			Proto: nfttest.UDP, From: n.top.Pod, To: n.top.Outside, Dst: dst, Timeout: 60 * time.Millisecond,
		}
		s, err := n.top.Send(flow)
		if errors.Is(err, nfttest.ErrNotSeen) {
			continue
		}
		n.check(err)
		verdict := judge.Decide(p, nft.Connection{Src: src, Dst: dst.Addr()})
		q := conntrack.Question{From: src, To: dst, Protocol: unix.IPPROTO_UDP}
		all = append(all, sending{q, s, address, string(verdict)})
	}
	return all
}

// Next to the rules of any other program, a connection agrees with the policy if the far end sees what the policy
// says, and otherwise contradicts it. Which rule it was does not matter.
func TestEvidenceIsWhatTheFarEndSaw(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "nft", "iptables-nft-restore", "ip6tables-nft-restore")
	dirs, err := filepath.Glob("../../testdata/foreign/*")
	if err != nil || len(dirs) == 0 {
		t.Fatal("no cases", err)
	}
	r := rand.New(rand.NewPCG(*seed, 63))
	n := newTrafficNode(t)
	addresses := []string{
		"10.9.0.9", "10.240.7.7", "203.0.113.9", "198.51.100.9", "10.96.0.11", "192.168.122.7", "2001:db8:77::8",
		"fd00:88::9", "10.1.1.5",
	}
	configs := []string{"enableIPv6: true\n", "enableIPv6: true\nmasqueradeSrcCIDRs: [10.244.1.0/24, 'fd00::/8']\n"}
	agreed, contradicted := 0, 0
	for _, dir := range dirs {
		for _, config := range configs {
			nfttest.NFT(t, n.top.Node, "", "flush", "ruleset")
			nfttest.Run(t, n.top.Node, "", "conntrack", "-F")
			want := n.enforce(config)
			nfttest.LoadForeign(t, n.top.Node, dir, func(rules string) string { return meetThePod(r, rules) })
			history := n.noted(want.Policy)
			sent := n.sendNext(want.Policy, addresses)
			var questions []conntrack.Question
			for _, s := range sent {
				questions = append(questions, s.question)
			}
			e := n.gathered(want.Policy, history, questions...)
			for i, s := range sent {
				c := e.Answers[i]
				right := s.Masqueraded() == (s.verdict == string(nft.Masqueraded))
				if c.Open() == 0 { // tracking is off, or the destination was translated
					if e.NotJudged["service"] == 0 && !untracked(dir) {
						t.Errorf("seed %d: %s, %q: nothing about %s, %v", *seed, filepath.Base(dir), config, s.asked, e.NotJudged)
					}
					continue
				}
				if right != (c.Agrees == 1) || right == (c.Overruled == 1) {
					t.Errorf("seed %d: %s, %q: %s is %s and seen from %s, but %+v", *seed, filepath.Base(dir), config, s.asked,
						s.verdict, s.Seen, c)
				}
				agreed += c.Agrees
				contradicted += c.Overruled
			}
		}
	}
	t.Logf("%d agreed, %d contradicted", agreed, contradicted)
	if agreed < 100 || contradicted < 10 {
		t.Errorf("%d agreed, %d contradicted", agreed, contradicted)
	}
}

// untracked reports whether a program turns off the tracking of connections.
func untracked(dir string) bool { return filepath.Base(dir) == "cilium-iptables-native" }

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/script"
)

// A situation is a case of a file of testdata: what a node has, and what is asked and expected there.
type situation struct {
	place         string // FILE:LINE
	config, rules string // the latter those of other programs, in nft's syntax
	lines         [][2]string
}

// situations reads a file. A line with a tab is a rule, and "config" begins a line of the config. Other lines are a word,
// or a mark, and what follows it.
func situations(t *testing.T, name string) (all []situation) {
	t.Helper()
	for _, c := range script.Read(t, filepath.Join(root, "testdata", name+".txt")) {
		s := situation{place: c.Place}
		for _, step := range c.Steps {
			word, rest, _ := strings.Cut(step.Line, " ")
			switch {
			case strings.HasPrefix(step.Line, "\t"):
				s.rules += step.Line[1:] + "\n"
			case word == "config":
				s.config += rest + "\n"
			default:
				step.IsDocumented(t)
				s.lines = append(s.lines, [2]string{word, rest})
			}
			for _, want := range step.Wants {
				s.lines = append(s.lines, [2]string{string(want.Mark), want.Text})
			}
		}
		all = append(all, s)
	}
	return all
}

// of returns what follows a word.
func (s situation) of(word string) (all []string) {
	for _, line := range s.lines {
		if line[0] == word {
			all = append(all, line[1])
		}
	}
	return all
}

// here runs a command in this process, in the node's namespace, and reads its answer.
func (n trafficNode) here(answer any, args ...string) {
	n.t.Helper()
	got := n.inProcess(noProcesses(n.t), append(slices.Clip(args), "-o", "json")...)
	if err := json.Unmarshal([]byte(got.stdout), answer); err != nil {
		n.t.Fatalf("%+v: %v", got, err)
	}
}

// explained runs explain on the node, and returns its answer and its text.
func (n trafficNode) explained(args ...string) (x answer.Explanation, text string) {
	n.t.Helper()
	n.here(&x, append([]string{"explain"}, args...)...)
	return x, unwrap(x.String())
}

// seen is the source address that the outside host sees of a connection from the pod.
func (n trafficNode) seen(dst netip.Addr, port uint16) netip.Addr {
	n.t.Helper()
	flow := nfttest.Flow{Proto: nfttest.UDP, From: n.top.Pod, To: n.top.Outside, Dst: netip.AddrPortFrom(dst, port)}
	return nfttest.MustSend(n.t, n.top, flow).Seen.Addr()
}

// mayBeLost reports whether an explanation says that nothing may arrive.
func mayBeLost(x answer.Explanation) bool {
	return slices.Contains([]string{"dropped", "rejected", "no-route"}, x.Why.Code) ||
		slices.ContainsFunc(x.Notes, func(p config.Problem) bool { return p.ID == "may-drop" }) ||
		x.Why.Code == "unknown" && strings.Contains(strings.Join(x.Possible, "\n"), "nothing") ||
		strings.HasPrefix(x.Headline, "unknown: ")
}

// contradicts says how an explanation and what the far end sees of a packet differ; "" if they do not. A packet
// that is lost has no source.
func contradicts(x answer.Explanation, seen netip.Addr) string {
	possible := strings.Join(x.Possible, "\n")
	switch lost, arrives := !seen.IsValid(), "it arrives from "+seen.String(); {
	case lost && !mayBeLost(x):
		return "it does not arrive"
	case lost, x.Why.Code == "translated-first", strings.HasPrefix(x.Headline, "unknown: "):
		return ""
	case x.Why.Code == "unknown":
		vague := strings.Contains(possible, " not known") || strings.Contains(possible, "one of ")
		if !vague && (!strings.Contains(possible, seen.String()) || len(x.Why.Unknown) == 0) {
			return arrives
		}
	case x.Sees != seen.String(), x.Why.Code != "local" && !strings.Contains(x.Headline, " sees "+seen.String()):
		return arrives
	}
	return ""
}

// judge compares an explanation with what the far end sees of a packet.
func (n trafficNode) judge(x answer.Explanation, seen netip.Addr) {
	n.t.Helper()
	if wrong := contradicts(x, seen); wrong != "" {
		n.t.Errorf("%s; explained is %s, %q %q", wrong, x.Why.Code, x.Headline, x.Possible)
	}
}

// sends opens a connection between two addresses, of which the node and the pod may have one, and compares it.
func (n trafficNode) sends(x answer.Explanation, proto nfttest.Proto, src netip.Addr, dst netip.AddrPort) {
	n.t.Helper()
	here := func(a netip.Addr) bool {
		return slices.Contains([]netip.Addr{n.top.NodeV4, n.top.NodeV6, n.top.GatewayV4, n.top.GatewayV6}, a)
	}
	flow := nfttest.Flow{
		Proto: proto, From: n.top.Pod, To: n.top.Outside, Foreign: proto == nfttest.UDP, Src: netip.AddrPortFrom(src, 0),
		Dst: dst,
	}
	switch {
	case here(dst.Addr()):
		flow.To = n.top.Node
	case dst.Addr() == n.top.PodV4, dst.Addr() == n.top.PodV6, strings.HasPrefix(x.Headline, src.String()+", the end"):
		flow.To = n.top.Pod
	}
	if here(src) {
		flow.From = n.top.Node
	}
	if flow.From == n.top.Pod && (dst.Addr() == n.top.PodV4 || dst.Addr() == n.top.PodV6) {
		return // it does not leave the pod
	}
	if mayBeLost(x) {
		flow.Timeout = 150 * time.Millisecond // if it comes later, less is tested
	}
	s, err := nfttest.Send(flow)
	if err != nil && !errors.Is(err, nfttest.ErrNotSeen) {
		n.t.Fatal(err)
	}
	n.judge(x, s.Seen.Addr())
}

// Next to rules and routes that decide in all ways, explain says what the far end sees, and no connection of the
// policy in force is stale, whatever other programs did to it.
func TestTheFarEndSeesWhatExplainSays(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "nft", "ip", "iptables-nft")
	for file, modes := range map[string][]nft.Mode{
		"modes": modes, "rules": {nft.ModeNFTables}, "routes": {nft.ModeNFTables},
		"iptables": {nft.ModeIPTables}, "services": {nft.ModeNFTables},
	} {
		for _, mode := range modes {
			t.Run(string(mode)+" "+file, func(t *testing.T) {
				t.Parallel()
				n := newTrafficNode(t)
				for i, s := range situations(t, "explain/"+file) {
					t.Run(s.place, func(t *testing.T) {
						defer func(all testing.TB) { n.t = all }(n.t)
						n.t = t
						n := n
						if file != "modes" && file != "rules" { // what it does there stays
							n = newTrafficNode(t)
						}
						n.situation(s, "--mode="+string(mode), uint16(5000+10*i))
					})
				}
			})
		}
	}
}

func (n trafficNode) situation(s situation, flag string, port uint16) {
	n.t.Helper()
	nfttest.NFT(n.t, n.top.Node, "", "flush", "ruleset")
	n.enforce(s.config, flag)
	for _, command := range s.of("run") {
		words := strings.Fields(command)
		nfttest.Run(n.t, n.top.Node, "", words[0], words[1:]...)
	}
	rules := s.rules
	if !strings.HasPrefix(rules, "table ") {
		rules = "table ip x {\n" + rules + "}\n"
	}
	if _, err := n.top.Node.Output(rules, "nft", "-f", "-"); err != nil {
		if strings.Contains(err.Error(), "Invalid argument") || strings.Contains(err.Error(), "not supported") {
			return // the kernel is older than the rule
		}
		n.t.Fatal(err)
	}
	var x answer.Explanation
	var text string
	for i, line := range s.lines {
		switch line[0] {
		case "explain":
			words := strings.Fields(line[1])
			dst, err := netip.ParseAddrPort(words[0])
			if err != nil {
				dst = netip.AddrPortFrom(netip.MustParseAddr(words[0]), port+uint16(i))
			}
			src, proto := n.top.PodV4, nfttest.UDP
			if dst.Addr().Is6() {
				src = n.top.PodV6
			}
			if words[len(words)-1] == string(nfttest.TCP) { // an ordinary packet is received before the hook input
				proto, words = nfttest.TCP, words[:len(words)-1]
			}
			if at := slices.Index(words, "--from"); at > 0 {
				src = netip.MustParseAddr(words[at+1])
			} else {
				words = append(words, "--from", src.String())
			}
			x = answer.Explanation{}
			n.here(&x, append(append([]string{"explain"}, words...), "--config", n.path, flag)...)
			text = x.Headline + " " + unwrap(x.String()) // in the headline no line is broken
			for range 2 {
				n.sends(x, proto, src, dst)
			}
			var open answer.Connections
			n.here(&open, "connections", "--stale", dst.Addr().String(), "--config", n.path, flag)
			for _, c := range open.Connections {
				if strings.HasSuffix(c.Destination, fmt.Sprint(":", dst.Port())) {
					n.t.Errorf("stale under the policy in force: %+v", c)
				}
			}
		case "=":
			code, sees, _ := strings.Cut(line[1], " ")
			if x.Why.Code != code || sees != "" && x.Sees != sees {
				n.t.Errorf("why %+v, sees %q; want %s: %s", x.Why, x.Sees, line[1], text)
			}
		case "~":
			if !strings.Contains(text, line[1]) {
				n.t.Errorf("%q is not in:\n%s", line[1], text)
			}
		}
	}
}

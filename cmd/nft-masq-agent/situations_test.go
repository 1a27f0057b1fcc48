package main

import (
	"context"
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
	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/nftrace"
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
func (n *testNode) here(answer any, args ...string) result {
	n.t.Helper()
	got := n.run(append(slices.Clip(args), "-o", "json")...)
	if err := json.Unmarshal([]byte(got.stdout), answer); err != nil {
		n.t.Fatalf("%+v: %v", got, err)
	}
	return got
}

// explained runs explain on the node, and returns its answer and its text.
func (n trafficNode) explained(args ...string) (x answer.Explanation, text string) {
	n.t.Helper()
	n.here(&x, append([]string{"explain"}, args...)...)
	var b strings.Builder
	n.check(cli.Print(&b, false, x.Print))
	return x, unwrap(b.String())
}

// seen is the source address that the outside host sees of a connection from the pod.
func (n trafficNode) seen(dst netip.Addr, port uint16) netip.Addr {
	n.t.Helper()
	flow := nfttest.Flow{Proto: nfttest.UDP, From: n.top.Pod, To: n.top.Outside, Dst: netip.AddrPortFrom(dst, port)}
	return nfttest.MustSend(n.t, n.top, flow).Seen.Addr()
}

// contradicts says how an explanation and what the far end sees of a packet differ; "" if they do not: what an
// explanation does not claim cannot differ. A packet that is lost has no source.
func contradicts(x answer.Explanation, seen netip.Addr) string {
	nothing := x.Why.Code == answer.NoRoute || x.Why.Code == answer.NotForwarded
	switch {
	case nothing && !seen.IsValid(), !nothing && !x.Sees.IsValid(), !nothing && x.Sees == seen:
		return ""
	case !seen.IsValid():
		return "the far end sees nothing"
	}
	return "the far end sees " + seen.String()
}

// judge compares an explanation with what the far end sees of a packet.
func (n trafficNode) judge(x answer.Explanation, seen netip.Addr) {
	n.t.Helper()
	if wrong := contradicts(x, seen); wrong != "" {
		n.t.Errorf("%s; explained is %s, %q", wrong, x.Why.Code, x.Headline)
	}
}

// sends opens a connection between two addresses, of which the node and the pod may have one, and returns the source
// that the far end sees.
func (n trafficNode) sends(proto nfttest.Proto, src netip.Addr, dst netip.AddrPort) netip.Addr {
	n.t.Helper()
	here := func(a netip.Addr) bool {
		return slices.Contains([]netip.Addr{n.top.NodeV4, n.top.NodeV6, n.top.GatewayV4, n.top.GatewayV6}, a)
	}
	flow := nfttest.Flow{
		Proto: proto, From: n.top.Pod, To: n.top.Outside, Foreign: proto == nfttest.UDP, Src: netip.AddrPortFrom(src, 0),
		Dst: dst, Answered: true, Timeout: 150 * time.Millisecond, // if it comes later, less is tested
	}
	switch {
	case here(dst.Addr()):
		flow.To = n.top.Node
	case dst.Addr() == n.top.PodV4, dst.Addr() == n.top.PodV6:
		flow.To = n.top.Pod
	}
	if here(src) {
		flow.From = n.top.Node
	}
	s, err := nfttest.Send(flow)
	if err != nil && !errors.Is(err, nfttest.ErrNotSeen) {
		n.t.Fatal(err)
	}
	return s.Seen.Addr()
}

// Next to rules and routes that decide in all ways, explain claims nothing that the far end does not see: before a
// connection shows it, it says what should be seen; then it says what is.
func TestTheFarEndSeesWhatExplainSays(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "nft", "ip", "iptables-nft")
	for file, modes := range map[string][]nft.Mode{
		"modes": modes, "rules": {nft.ModeNFTables}, "routes": {nft.ModeNFTables},
		"iptables": {nft.ModeIPTables}, "services": {nft.ModeNFTables},
	} {
		for _, mode := range modes {
			size := 15 // on a node
			if file != "modes" && file != "rules" {
				size = 1 // what they do to it stays
			}
			for part := range slices.Chunk(situations(t, "explain/"+file), size) {
				t.Run(string(mode)+" "+file, func(t *testing.T) {
					t.Parallel()
					n := newTrafficNode(t)
					for i, s := range part {
						t.Run(s.place, func(t *testing.T) {
							defer func(all testing.TB) { n.t = all }(n.t)
							n.t = t
							n.situation(s, "--mode="+string(mode), uint16(5000+10*i))
						})
					}
				})
			}
		}
	}
}

func (n trafficNode) situation(s situation, flag string, port uint16) {
	n.t.Helper()
	n.flush()
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
	for i, line := range s.lines {
		if line[0] != "explain" {
			continue
		}
		want := ""
		if i+1 < len(s.lines) && s.lines[i+1][0] == ">" {
			want = s.lines[i+1][1]
		}
		within := 5 * time.Second // the trace is told at once
		if want == noPacket {
			within = time.Second / 8
		}
		decided := n.explains(strings.Fields(line[1]), flag, port+uint16(i), within)
		if !slices.Contains(strings.Split(want, " or "), decided) { // "or": the endpoint is drawn by lot
			n.t.Errorf("explain %s: the trace says %q, want %q", line[1], decided, want)
		}
	}
}

// noPacket is that no chain met the packet, because a device drops it.
const noPacket = "no packet"

// explains asks about a packet before one is sent and afterwards, and compares the answers with what the far end sees.
// It returns what a trace says of the packet within a time: what happened to it, and the rule that decided.
func (n trafficNode) explains(words []string, flag string, port uint16, within time.Duration) (decided string) {
	n.t.Helper()
	dst, err := netip.ParseAddrPort(words[0])
	if err != nil {
		dst = netip.AddrPortFrom(netip.MustParseAddr(words[0]), port)
		words[0] = dst.String()
	}
	src := n.podFor(dst.Addr())
	proto := nfttest.UDP
	if words[len(words)-1] == string(nfttest.TCP) { // an ordinary packet is received before the hook input
		proto = nfttest.TCP
		words = words[:len(words)-1]
	}
	position := slices.Index(words, "--from")
	if position > 0 {
		src = netip.MustParseAddr(words[position+1])
	} else {
		words = append(words, "--from", src.String())
	}
	if (dst.Addr() == n.top.PodV4 || dst.Addr() == n.top.PodV6) && src == dst.Addr() {
		return "" // it does not leave the pod
	}
	args := append(append([]string{"explain"}, words...), "--protocol", string(proto), "--config", n.path, flag)
	var before, after answer.Explanation
	n.here(&before, args...)
	var seen netip.Addr
	trace, none := n.traced(src, dst, proto, within, func() { seen = n.sends(proto, src, dst) })
	n.sends(proto, src, dst)
	n.judge(before, seen)
	if before.Sees.IsValid() {
		n.t.Errorf("claimed before a connection showed it: %s", before.Headline)
	}
	if before.ShouldSee.IsValid() && before.Why.Code == answer.Should &&
		!strings.Contains(before.Headline, " should see ") {
		n.t.Errorf("nothing shows it, but the headline is: %s", before.Headline)
	}
	n.here(&after, args...)
	n.judge(after, seen)
	if after.Why.Code == answer.Contradicted && seen.IsValid() && seen == after.ShouldSee {
		n.t.Errorf("the far end sees %s, explained is %s: %s", seen, after.Why.Code, after.Headline)
	}
	n.t.Logf("%s: %s should be seen, %s is", after.Why.Code, after.ShouldSee, seen)
	if none != nil {
		return noPacket
	}
	left, _ := netip.ParseAddrPort(trace.SeenAs)
	if left.IsValid() && seen.IsValid() && left.Addr() != seen {
		n.t.Errorf("the far end sees %s, the trace says %s", seen, left)
	}
	return decision(trace)
}

// decision says what happened to a packet, and which rule decided that.
func decision(trace nftrace.Trace) string {
	r := trace.Rule
	switch {
	case r == nil:
		return string(trace.Outcome) + ": no rule"
	case r.Owner == nftrace.Agent:
		return string(trace.Outcome) + ": this agent"
	case r.Owner == nftrace.Older:
		return string(trace.Outcome) + ": an older agent"
	}
	return fmt.Sprintf("%s: %s %s %s handle %d", trace.Outcome, r.Family, r.Table, r.Chain, r.Handle)
}

// traced traces the packet that a function sends, within a time.
func (n trafficNode) traced(
	src netip.Addr, dst netip.AddrPort, proto nfttest.Proto, within time.Duration, send func(),
) (trace nftrace.Trace, none error) {
	n.t.Helper()
	query := nftrace.Query{From: src, To: dst, Protocol: conntrack.ParseProtocol(string(proto))}
	ctx, cancel := context.WithCancel(n.t.Context())
	defer cancel()
	sent := make(chan struct{})
	ready := func() {
		go func() {
			defer close(sent)
			send()
			time.AfterFunc(nfttest.Patient(within), cancel)
		}()
	}
	none = n.Do(func() error {
		return nfttest.While(ctx, nftrace.ErrRunning, func() (err error) {
			trace, err = nftrace.Run(ctx, query, ready)
			return err
		})
	})
	if none != nil && !errors.Is(none, nftrace.ErrNoPacket) {
		n.t.Fatal(none)
	}
	<-sent
	return trace, none
}

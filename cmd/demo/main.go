// Command demo shows the agent at work with the sample config, in separate
// network namespaces: a pod, a node and an outside host, with real packets
// between them. It shows a newcomer in a minute and a half what the agent is for,
// changes nothing on the machine, and exits by itself.
//
//	demo AGENT CONFIG [RELOADS]
package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/agent"
	"nft-masq-agent/nft/nfttest/netns"
)

func main() {
	const usage = "usage: demo AGENT CONFIG [RELOADS]\n\nShows the agent (a binary) at work with a config, in network " +
		"namespaces of its own. It reloads the config 200 times, unless RELOADS says otherwise."
	if len(os.Args) == 2 && slices.Contains([]string{"-h", "-help", "--help"}, os.Args[1]) {
		fmt.Println(usage)
		return
	}
	reloads := 200
	if len(os.Args) == 4 {
		reloads, _ = strconv.Atoi(os.Args[3])
	}
	if len(os.Args) < 3 || len(os.Args) > 4 || reloads < 1 {
		fmt.Fprintln(os.Stderr, usage)
		os.Exit(2)
	}
	if code, ran := netns.InUserNS(); ran {
		os.Exit(code)
	}
	if err := nfttest.Part(func() { demo(os.Args[1], os.Args[2], reloads) }); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

// A stage is the state of the demo.
type stage struct {
	top    *nfttest.Topology
	config string // the file that the agent follows
	agent  *agent.Agent
	most   int // bounds the reloads: in a minute an emulated machine makes fewer
}

// comments are lines of the config that are not shown.
var comments = regexp.MustCompile(`(?m)^#.*\n`)

func demo(program, example string, reloads int) {
	top := nfttest.Must(nfttest.OpenTopology())
	defer func() { _ = top.Close() }()
	dir := nfttest.Must(os.MkdirTemp("", "nft-masq-agent-demo-"))
	defer func() { _ = os.RemoveAll(dir) }()
	s := &stage{top: top, config: filepath.Join(dir, "ip-masq-agent"), most: reloads}
	text := nfttest.Must(os.ReadFile(example))
	s.swap(string(text))
	say("The node starts the agent with this config:")
	fmt.Print(indent(comments.ReplaceAllString(string(text), "")))
	cmd := nfttest.Command(program, "run", "--config", s.config, "--enable-ipv6")
	s.agent = nfttest.Must(agent.Start(top.Node, cmd))
	defer func() {
		_ = s.agent.Kill()
		<-s.agent.Done()
	}()
	s.play(string(text))
}

// swap replaces the config by a rename, like the kubelet and careful editors.
func (s *stage) swap(text string) {
	next := s.config + ".new"
	nfttest.Check(os.WriteFile(next, []byte(text), 0o600))
	nfttest.Check(os.Rename(next, s.config))
}

// apply replaces the config, and waits until it is in the kernel.
func (s *stage) apply(text string) {
	s.swap(text)
	s.await("config_applied")
}

// await waits until the agent logs an event.
func (s *stage) await(event string) {
	nfttest.Must(s.agent.Await(context.Background(), event))
}

// A visit is a destination, and whether it must see the node, at each step of the demo.
type visit struct {
	dst  string
	node []bool
}

// steps are the columns of the table of visits.
var steps = []string{"at first", "after the edit", "after the flush"}

func visits() []visit {
	return []visit{
		{"10.9.0.9", []bool{false, false, false}},
		{"198.51.100.1", []bool{true, false, false}},
		{"203.0.113.9", []bool{true, true, true}},
		{"2001:db8:1::1", []bool{true, false, false}},
	}
}

func (s *stage) play(text string) {
	s.await("config_applied")
	edited := strings.Replace(text, "nonMasqueradeCIDRs:\n",
		"nonMasqueradeCIDRs:\n  - 198.51.100.0/24\n  - 2001:db8:1::/48\n", 1)
	seen := make([][]string, len(steps))
	seen[0] = s.visit(0)
	s.apply(edited)
	seen[1] = s.visit(1)
	nfttest.Must(s.top.Node.Output("", "nft", "flush", "ruleset"))
	s.await("rules_restored")
	seen[2] = s.visit(2)
	say("Who each destination saw when the pod (%s, %s) connected over TCP and UDP: at first, after an edit that also "+
		"exempts 198.51.100.0/24 and 2001:db8:1::/48, and after another program's nft flush ruleset:", s.top.PodV4,
		s.top.PodV6)
	fmt.Printf("  %-16s %-16s %-16s %s\n", "destination", steps[0], steps[1], steps[2])
	for i, v := range visits() {
		fmt.Printf("  %-16s %-16s %-16s %s\n", v.dst, seen[0][i], seen[1][i], seen[2][i])
	}
	tally, reloads := s.reload(text, edited)
	s.conflict(text)
	s.leak(text)
	s.leave()
	say("Verified: each destination saw the right address before and after the edit and the flush, and for each of %d "+
		"new connections during %d reloads; enforceNonMasquerade and dropInvalid had their effect.", tally.Seen(), reloads)
}

// visit connects from the pod to each destination, and checks the source that it saw.
func (s *stage) visit(step int) (seen []string) {
	for _, v := range visits() {
		who := s.sees(v.dst)
		if (who == node) != v.node[step] {
			nfttest.Check(fmt.Errorf("%s saw %s %s", v.dst, who, steps[step]))
		}
		seen = append(seen, who)
	}
	return seen
}

// What a destination sees.
const (
	pod  = "the pod"
	node = "the node"
)

// sees connects from the pod over TCP and UDP.
func (s *stage) sees(dst string) (who string) {
	for _, proto := range []nfttest.Proto{nfttest.TCP, nfttest.UDP} {
		saw := nfttest.Must(s.top.Send(nfttest.Flow{
			Proto: proto, From: s.top.Pod, Dst: netip.AddrPortFrom(netip.MustParseAddr(dst), 7000),
		}))
		before := who
		if who = pod; saw.Masqueraded() {
			who = node
		}
		if before != "" && who != before {
			nfttest.Check(fmt.Errorf("%s saw %s over TCP and %s over UDP", dst, before, who))
		}
	}
	return who
}

// conflict has another program masquerade an exempt destination: explain names its
// rule, and enforceNonMasquerade wins against it.
func (s *stage) conflict(text string) {
	say("Another program masquerades all traffic of pods. explain --trace names its rule:")
	const rules = "table ip cni { chain post { type nat hook postrouting priority 100; ip saddr 10.244.0.0/16 " +
		"masquerade; }; }"
	nfttest.Must(s.top.Node.Output(rules, "nft", "-f", "-"))
	var who string
	out := s.trace(func() { who = s.sees("10.9.0.9") })
	headline, _, _ := strings.Cut(out, "\n\n")
	fmt.Print(indent(headline))
	fmt.Printf("  10.9.0.9 saw %s\n", who)
	say("With enforceNonMasquerade: true and the pods' masqueradeSrcCIDRs:")
	enforced := text + "masqueradeSrcCIDRs: [10.244.0.0/16]\nenforceNonMasquerade: true\n"
	s.apply(enforced)
	kept := s.sees("10.9.0.9")
	fmt.Printf("  10.9.0.9 saw %s\n", kept)
	if who != node || kept != pod {
		nfttest.Check(fmt.Errorf("10.9.0.9 saw %s, then %s", who, kept))
	}
	nfttest.Must(s.top.Node.Output("", "nft", "delete", "table", "ip", "cni"))
}

// trace returns what explain --trace prints of the first packet to 10.9.0.9 that send sends.
func (s *stage) trace(send func()) string {
	cmd := nfttest.Command(os.Args[1], "explain", "10.9.0.9", "--from", s.top.PodV4.String(), "--trace")
	var out strings.Builder
	cmd.Stdout = &out
	stderr := nfttest.Must(cmd.StderrPipe())
	tracer := nfttest.Must(s.top.Node.Start(cmd))
	_, err := bufio.NewReader(stderr).ReadString('\n') // when it waits for a packet
	nfttest.Check(err)
	send()
	nfttest.Check(tracer.Wait())
	return out.String()
}

// leak sends a segment that belongs to no connection.
func (s *stage) leak(text string) {
	const fin = 0x01
	segment := nfttest.Flow{
		Proto: nfttest.TCP, From: s.top.Pod, Dst: netip.MustParseAddrPort("203.0.113.9:7000"), Flags: fin,
	}
	sources := text + "masqueradeSrcCIDRs: [10.244.0.0/16]\n"
	s.apply(sources)
	say("The pod sends a FIN that belongs to no connection. NAT does not translate it:")
	saw := nfttest.Must(s.top.Send(segment))
	fmt.Printf("  203.0.113.9 saw %s\n", saw.Seen.Addr())
	say("With dropInvalid: true:")
	s.apply(sources + "dropInvalid: true\n")
	segment.Timeout = time.Second
	if saw, err := s.top.Send(segment); !errors.Is(err, nfttest.ErrNotSeen) {
		nfttest.Check(errors.Join(err, fmt.Errorf("203.0.113.9 saw %s", saw.Seen.Addr())))
	}
	out := nfttest.Must(s.top.Node.Output("", "nft", "list", "counter", "inet", "nft-masq-agent", "invalid-v4"))
	if strings.Contains(out, "packets 0 ") {
		nfttest.Check(errors.New("no packet was counted as dropped"))
	}
	fmt.Println("  203.0.113.9 saw nothing, and the counter invalid-v4 has the packet")
}

// reload swaps the two configs back and forth while the pod opens connections to
// destinations that both treat alike.
func (s *stage) reload(a, b string) (tally nfttest.Tally, reloads int) {
	say("Up to %d reloads in a minute, with new connections in the meantime:", s.most)
	hammer := nfttest.Must(s.top.StartHammer(
		nfttest.Target{Proto: nfttest.UDP, Dst: netip.MustParseAddr("10.9.0.9")},
		nfttest.Target{Proto: nfttest.UDP, Dst: netip.MustParseAddr("203.0.113.9"), Masqueraded: true},
		nfttest.Target{Proto: nfttest.TCP, Dst: netip.MustParseAddr("10.9.0.9")},
		nfttest.Target{Proto: nfttest.TCP, Dst: netip.MustParseAddr("203.0.113.9"), Masqueraded: true},
	))
	for end := time.Now().Add(time.Minute); reloads < s.most && time.Now().Before(end); reloads++ {
		text := a
		if reloads%2 == 1 {
			text = b
		}
		s.apply(text)
		progress("%d reloads, %d connections", reloads+1, hammer.SoFar().Seen())
	}
	nfttest.Check(hammer.Wait(context.Background(), uint64(50*s.most)))
	tally = nfttest.Must(hammer.Stop())
	fmt.Println(" ", tally)
	nfttest.Check(tally.Err())
	return tally, reloads
}

// progress shows a line in place of the one before it, which ends with the next line of the demo.
// Only a terminal shows it.
func progress(format string, args ...any) {
	if _, err := unix.IoctlGetTermios(int(os.Stdout.Fd()), unix.TCGETS); err == nil {
		fmt.Printf("  "+format+"\r", args...)
	}
}

// leave stops the agent: the rules stay until cleanup removes them.
func (s *stage) leave() {
	say("The agent exits on SIGTERM, and the rules stay; cleanup removes them:")
	nfttest.Check(s.agent.Stop())
	out := nfttest.Must(s.top.Node.Output("", os.Args[1], "cleanup"))
	fmt.Print(indent(out))
}

func say(format string, args ...any) { fmt.Printf("\n"+format+"\n", args...) }

func indent(text string) string {
	text = strings.TrimRight(text, "\n")
	return "  " + strings.ReplaceAll(text, "\n", "\n  ") + "\n"
}

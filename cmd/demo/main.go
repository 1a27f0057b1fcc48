// Command demo shows the agent at work with the sample config, in separate
// network namespaces: a pod, a node and an outside host, with real packets
// between them. It shows a newcomer in a minute and a half what the agent is for,
// changes nothing on the machine, and exits by itself.
//
//	demo AGENT CONFIG [RELOADS]
package main

import (
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
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/agent"
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
	if code, ran := nfttest.InUserNS(); ran {
		os.Exit(code)
	}
	if err := demo(os.Args[1], os.Args[2], reloads); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

// A stage is the state of the demo.
type stage struct {
	top    *nfttest.Topology
	config string // the file that the agent follows
	agent  *agent.Agent
	quiet  atomic.Bool // whether its log is hidden
	most   int         // bounds the reloads: in a minute an emulated machine makes fewer
}

// comments matches the comment lines of the config.
var comments = regexp.MustCompile(`(?m)^#.*\n`)

func demo(program, example string, reloads int) error {
	top, err := nfttest.OpenTopology()
	if err != nil {
		return err
	}
	defer func() { _ = top.Close() }()
	dir, err := os.MkdirTemp("", "nft-masq-agent-demo-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	s := &stage{top: top, config: filepath.Join(dir, "ip-masq-agent"), most: reloads}
	text, err := os.ReadFile(example)
	if err != nil {
		return err
	}
	if err := s.swap(string(text)); err != nil {
		return err
	}
	say("The node starts the agent with this config:")
	fmt.Print(indent(comments.ReplaceAllString(string(text), "")))
	cmd := nfttest.Command(program, "run", "--config", s.config, "--enable-ipv6", "--log-format", "text")
	cmd.Stdout = s
	if s.agent, err = agent.Start(top.Node, cmd); err != nil {
		return err
	}
	defer func() {
		_ = s.agent.Kill()
		<-s.agent.Done()
	}()
	return s.play(string(text))
}

// Write shows lines of the agent's log.
func (s *stage) Write(lines []byte) (int, error) {
	if s.quiet.Load() {
		return len(lines), nil
	}
	for line := range strings.Lines(string(lines)) {
		fmt.Print("  agent: ", line)
	}
	return len(lines), nil
}

// swap replaces the config by a rename, like the kubelet and careful editors.
func (s *stage) swap(text string) error {
	next := s.config + ".new"
	if err := os.WriteFile(next, []byte(text), 0o600); err != nil {
		return err
	}
	return os.Rename(next, s.config)
}

// apply replaces the config, and waits until it is in the kernel.
func (s *stage) apply(text string) error {
	if err := s.swap(text); err != nil {
		return err
	}
	return s.await("config_applied")
}

// await waits until the agent logs an event.
func (s *stage) await(event string) error {
	_, err := s.agent.Await(context.Background(), event)
	return err
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

func (s *stage) play(text string) error {
	if err := s.await("config_applied"); err != nil {
		return err
	}
	say("The table as nft lists it on the node:")
	list, err := s.top.Node.Output("", "nft", "list", "table", "inet", "nft-masq-agent")
	if err != nil {
		return err
	}
	fmt.Print(indent(list))
	edited := strings.Replace(text, "nonMasqueradeCIDRs:\n",
		"nonMasqueradeCIDRs:\n  - 198.51.100.0/24\n  - 2001:db8:1::/48\n", 1)
	seen := make([][]string, len(steps))
	if seen[0], err = s.visit(0); err != nil {
		return err
	}
	say("The file is swapped for one that also exempts 198.51.100.0/24 and 2001:db8:1::/48:")
	if err := s.apply(edited); err != nil {
		return err
	}
	if seen[1], err = s.visit(1); err != nil {
		return err
	}
	if err := s.heal(); err != nil {
		return err
	}
	if seen[2], err = s.visit(2); err != nil {
		return err
	}
	say("Who each destination saw when the pod (%s, %s) connected over TCP and UDP:", s.top.PodV4, s.top.PodV6)
	fmt.Printf("  %-16s %-16s %-16s %s\n", "destination", steps[0], steps[1], steps[2])
	for i, v := range visits() {
		fmt.Printf("  %-16s %-16s %-16s %s\n", v.dst, seen[0][i], seen[1][i], seen[2][i])
	}
	tally, reloads, err := s.reload(text, edited)
	if err != nil {
		return err
	}
	if err := s.conflict(text); err != nil {
		return err
	}
	if err := s.leak(text); err != nil {
		return err
	}
	if err := s.leave(); err != nil {
		return err
	}
	say("Verified: each destination saw the right address before and after the edit and the flush, and for each of %d "+
		"new connections during %d reloads; enforceNonMasquerade and dropInvalid had their effect.", tally.Seen(), reloads)
	return nil
}

// visit connects from the pod to each destination, and checks the source that it saw.
func (s *stage) visit(step int) (seen []string, err error) {
	for _, v := range visits() {
		who, err := s.sees(v.dst)
		if err != nil {
			return nil, err
		}
		if (who == node) != v.node[step] {
			return nil, fmt.Errorf("%s saw %s %s", v.dst, who, steps[step])
		}
		seen = append(seen, who)
	}
	return seen, nil
}

// What a destination sees.
const (
	pod  = "the pod"
	node = "the node"
)

// sees connects from the pod over TCP and UDP.
func (s *stage) sees(dst string) (who string, err error) {
	for _, proto := range []nfttest.Proto{nfttest.TCP, nfttest.UDP} {
		saw, err := s.top.Send(nfttest.Flow{
			Proto: proto, From: s.top.Pod, Dst: netip.AddrPortFrom(netip.MustParseAddr(dst), 7000),
		})
		if err != nil {
			return "", err
		}
		before := who
		if who = pod; saw.Masqueraded() {
			who = node
		}
		if before != "" && who != before {
			return "", fmt.Errorf("%s saw %s over TCP and %s over UDP", dst, before, who)
		}
	}
	return who, nil
}

// heal flushes the ruleset.
func (s *stage) heal() error {
	say("Another program runs nft flush ruleset on the node, and the agent notices within 250 ms:")
	if _, err := s.top.Node.Output("", "nft", "flush", "ruleset"); err != nil {
		return err
	}
	return s.await("rules_restored")
}

// conflict has another program masquerade an exempt destination: explain names its
// rule, and enforceNonMasquerade wins against it.
func (s *stage) conflict(text string) error {
	say("Another program masquerades all traffic of pods. explain names its rule:")
	const rules = "table ip cni { chain post { type nat hook postrouting priority 100; ip saddr 10.244.0.0/16 " +
		"masquerade; }; }"
	if _, err := s.top.Node.Output(rules, "nft", "-f", "-"); err != nil {
		return err
	}
	out, err := s.top.Node.Output("", os.Args[1], "explain", "10.9.0.9", "--from", s.top.PodV4.String(),
		"--config", s.config, "--enable-ipv6")
	if err != nil {
		return err
	}
	headline, _, _ := strings.Cut(out, "\n\n")
	fmt.Print(indent(headline))
	who, err := s.sees("10.9.0.9")
	if err != nil {
		return err
	}
	fmt.Printf("  10.9.0.9 saw %s\n", who)
	say("With enforceNonMasquerade: true and the pods' masqueradeSrcCIDRs:")
	s.quiet.Store(true)
	defer s.quiet.Store(false)
	enforced := text + "masqueradeSrcCIDRs: [10.244.0.0/16]\nenforceNonMasquerade: true\n"
	if err := s.apply(enforced); err != nil {
		return err
	}
	kept, err := s.sees("10.9.0.9")
	if err != nil {
		return err
	}
	fmt.Printf("  10.9.0.9 saw %s\n", kept)
	if who != node || kept != pod {
		return fmt.Errorf("10.9.0.9 saw %s, then %s", who, kept)
	}
	_, err = s.top.Node.Output("", "nft", "delete", "table", "ip", "cni")
	return err
}

// leak sends a segment that belongs to no connection.
func (s *stage) leak(text string) error {
	const fin = 0x01
	segment := nfttest.Flow{
		Proto: nfttest.TCP, From: s.top.Pod, Dst: netip.MustParseAddrPort("203.0.113.9:7000"), Flags: fin,
	}
	sources := text + "masqueradeSrcCIDRs: [10.244.0.0/16]\n"
	s.quiet.Store(true)
	defer s.quiet.Store(false)
	if err := s.apply(sources); err != nil {
		return err
	}
	say("The pod sends a FIN that belongs to no connection. NAT does not translate it:")
	saw, err := s.top.Send(segment)
	if err != nil {
		return err
	}
	fmt.Printf("  203.0.113.9 saw %s\n", saw.Seen.Addr())
	say("With dropInvalid: true:")
	if err := s.apply(sources + "dropInvalid: true\n"); err != nil {
		return err
	}
	segment.Timeout = time.Second
	if saw, err := s.top.Send(segment); !errors.Is(err, nfttest.ErrNotSeen) {
		return errors.Join(err, fmt.Errorf("203.0.113.9 saw %s", saw.Seen.Addr()))
	}
	out, err := s.top.Node.Output("", "nft", "list", "counter", "inet", "nft-masq-agent", "invalid-v4")
	if err != nil {
		return err
	}
	if strings.Contains(out, "packets 0 ") {
		return errors.New("no packet was counted as dropped")
	}
	fmt.Println("  203.0.113.9 saw nothing, and the counter invalid-v4 has the packet")
	return nil
}

// reload swaps the two configs back and forth while the pod opens connections to
// destinations that both treat alike.
func (s *stage) reload(a, b string) (tally nfttest.Tally, reloads int, err error) {
	say("Up to %d reloads in a minute, with new connections in the meantime:", s.most)
	hammer, err := s.top.StartHammer(
		nfttest.Target{Proto: nfttest.UDP, Dst: netip.MustParseAddr("10.9.0.9")},
		nfttest.Target{Proto: nfttest.UDP, Dst: netip.MustParseAddr("203.0.113.9"), Masqueraded: true},
		nfttest.Target{Proto: nfttest.TCP, Dst: netip.MustParseAddr("10.9.0.9")},
		nfttest.Target{Proto: nfttest.TCP, Dst: netip.MustParseAddr("203.0.113.9"), Masqueraded: true},
	)
	if err != nil {
		return nfttest.Tally{}, 0, err
	}
	s.quiet.Store(true)
	for end := time.Now().Add(time.Minute); err == nil && reloads < s.most && time.Now().Before(end); reloads++ {
		text := a
		if reloads%2 == 1 {
			text = b
		}
		err = s.apply(text)
		progress("%d reloads, %d connections", reloads+1, hammer.SoFar().Seen())
	}
	s.quiet.Store(false)
	if err == nil {
		err = hammer.Wait(context.Background(), uint64(50*s.most))
	}
	var stopErr error
	tally, stopErr = hammer.Stop()
	fmt.Println(" ", tally)
	return tally, reloads, errors.Join(err, stopErr, tally.Err())
}

// progress shows a line in place of the one before it, which ends with the next line of the demo.
// Only a terminal shows it.
func progress(format string, args ...any) {
	if _, err := unix.IoctlGetTermios(int(os.Stdout.Fd()), unix.TCGETS); err == nil {
		fmt.Printf("  "+format+"\r", args...)
	}
}

// leave stops the agent: the rules stay until cleanup removes them.
func (s *stage) leave() error {
	say("The agent exits on SIGTERM, and the rules stay; cleanup removes them:")
	if err := s.agent.Stop(); err != nil {
		return err
	}
	out, err := s.top.Node.Output("", os.Args[1], "cleanup")
	fmt.Print(indent(out))
	return err
}

func say(format string, args ...any) { fmt.Printf("\n"+format+"\n", args...) }

func indent(text string) string {
	text = strings.TrimRight(text, "\n")
	return "  " + strings.ReplaceAll(text, "\n", "\n  ") + "\n"
}

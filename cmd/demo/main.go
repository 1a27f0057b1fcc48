// Command demo shows the agent at work with the sample config, in separate
// network namespaces: a pod, a node and an outside host, with real packets
// between them. It changes nothing on the machine and exits by itself. It exists so
// that a newcomer sees in seconds what the agent is for.
//
//	demo AGENT CONFIG
package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/agent"
)

func main() {
	if code, ran := nfttest.InUserNS(); ran {
		os.Exit(code)
	}
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: demo AGENT CONFIG")
		os.Exit(2)
	}
	if err := demo(os.Args[1], os.Args[2]); err != nil {
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
}

func demo(program, example string) error {
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
	s := &stage{top: top, config: filepath.Join(dir, "ip-masq-agent")}
	text, err := os.ReadFile(example)
	if err != nil {
		return err
	}
	if err := s.swap(string(text)); err != nil {
		return err
	}
	say("The node starts the agent with this config:")
	fmt.Print(indent(string(text)))
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

// await waits until the agent logs an event.
func (s *stage) await(event string) error {
	_, err := s.agent.Await(context.Background(), event)
	return err
}

// A visit is a connection from the pod and the source that the far end must see.
type visit struct {
	dst         string
	masqueraded bool
}

func (s *stage) play(text string) error {
	if err := s.await("config_applied"); err != nil {
		return err
	}
	if err := s.show("The table", "as nft lists it on the node:"); err != nil {
		return err
	}
	before := []visit{
		{"10.9.0.9", false}, {"198.51.100.1", true}, {"203.0.113.9", true}, {"2001:db8:1::1", true},
	}
	if err := s.visit(before); err != nil {
		return err
	}
	say("The file is swapped for one that also exempts 198.51.100.0/24 and 2001:db8:1::/48:")
	edited := strings.Replace(text, "nonMasqueradeCIDRs:\n", "nonMasqueradeCIDRs:\n  - 198.51.100.0/24\n  - 2001:db8:1::/48\n", 1)
	if err := errors.Join(s.swap(edited), s.await("config_applied")); err != nil {
		return err
	}
	if err := s.show("The table", "after the edit:"); err != nil {
		return err
	}
	after := []visit{
		{"10.9.0.9", false}, {"198.51.100.1", false}, {"203.0.113.9", true}, {"2001:db8:1::1", false},
	}
	if err := s.visit(after); err != nil {
		return err
	}
	if err := s.heal(); err != nil {
		return err
	}
	if err := s.visit(after); err != nil {
		return err
	}
	tally, err := s.reload(text, edited)
	if err != nil {
		return err
	}
	if err := s.leave(); err != nil {
		return err
	}
	say("Verified: the far end saw the pod's address for exempt destinations and the node's for all others, before and "+
		"after the edit, after two flushes, and for each of %d new connections during %d reloads.", tally.Seen(), reloads)
	return nil
}

func (s *stage) show(what, when string) error {
	say("%s %s", what, when)
	list, err := s.top.Node.Output("", "nft", "list", "table", "inet", "nft-masq-agent")
	fmt.Print(indent(list))
	return err
}

// visit connects from the pod and checks the source that the far end saw.
func (s *stage) visit(visits []visit) error {
	say("The pod (%s, %s) connects, and the far end sees:", s.top.PodV4, s.top.PodV6)
	for _, v := range visits {
		for _, proto := range []nfttest.Proto{nfttest.TCP, nfttest.UDP} {
			saw, err := s.top.Send(nfttest.Flow{
				Proto: proto, From: s.top.Pod, Dst: netip.AddrPortFrom(netip.MustParseAddr(v.dst), 7000),
			})
			if err != nil {
				return err
			}
			who := "the pod"
			if saw.Masqueraded() {
				who = "the node"
			}
			fmt.Printf("  %s to %-15s from %s, %s\n", proto, v.dst, saw.Seen.Addr(), who)
			if saw.Masqueraded() != v.masqueraded {
				return fmt.Errorf("%s to %s came from %s", proto, v.dst, saw.Seen.Addr())
			}
		}
	}
	return nil
}

// heal flushes the ruleset.
func (s *stage) heal() error {
	say("Another program runs nft flush ruleset on the node, and the agent notices within 250 ms:")
	if _, err := s.top.Node.Output("", "nft", "flush", "ruleset"); err != nil {
		return err
	}
	return s.await("rules_restored")
}

const reloads = 200

// reload swaps the two configs back and forth while the pod opens connections to
// destinations that both treat alike.
func (s *stage) reload(a, b string) (nfttest.Tally, error) {
	say("%d reloads, with new connections in the meantime:", reloads)
	hammer, err := s.top.StartHammer(
		nfttest.Target{Proto: nfttest.UDP, Dst: netip.MustParseAddr("10.9.0.9")},
		nfttest.Target{Proto: nfttest.UDP, Dst: netip.MustParseAddr("203.0.113.9"), Masqueraded: true},
		nfttest.Target{Proto: nfttest.TCP, Dst: netip.MustParseAddr("10.9.0.9")},
		nfttest.Target{Proto: nfttest.TCP, Dst: netip.MustParseAddr("203.0.113.9"), Masqueraded: true},
	)
	if err != nil {
		return nfttest.Tally{}, err
	}
	s.quiet.Store(true)
	for i := range reloads {
		text := a
		if i%2 == 1 {
			text = b
		}
		if err = s.swap(text); err == nil {
			err = s.await("config_applied")
		}
		if err != nil {
			break
		}
	}
	s.quiet.Store(false)
	if err == nil {
		err = hammer.Wait(context.Background(), 10_000)
	}
	tally, stopErr := hammer.Stop()
	fmt.Println(" ", tally)
	return tally, errors.Join(err, stopErr, tally.Err())
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

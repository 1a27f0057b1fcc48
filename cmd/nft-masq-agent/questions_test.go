package main

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"nft-masq-agent/nft/nfttest"
)

// A question is what an operator asks, with a real fault, and the one command that answers it.
type question struct {
	asked string
	// fault makes the fault on a node, and returns the command line.
	fault func(n trafficNode) []string
	first string // line of the answer, without what differs from run to run
	code  int
}

// questions are those of TROUBLESHOOTING.md.
func questions() []question {
	rejected := func(n trafficNode) {
		n.swap(exempting("10.0.0.0/8"))
		d := n.start()
		d.await("config_applied")
		n.swap(badText)
		d.await("config_rejected")
	}
	return []question{
		{
			asked: "Why does a destination see the node's IP?",
			fault: func(n trafficNode) []string {
				n.start().await("config_applied")
				n.nft("table ip cni { chain post { type nat hook postrouting priority srcnat; " +
					"ip saddr 10.244.0.0/16 masquerade; }; }")
				return []string{"explain", "10.9.0.9", "--from", "10.244.1.2"}
			},
			first: "10.9.0.9 sees 192.0.2.1, the address of eth0",
		},
		{
			asked: "Which pod is behind an address and port?",
			fault: func(n trafficNode) []string {
				n.enforce("toPorts: 40001-40001")
				n.open(nfttest.TCP, "203.0.113.9:5001")
				return []string{"connections", "--seen-as", "192.0.2.1:40001"}
			},
			first: "behind 192.0.2.1:40001: 10.244.1.2",
		},
		{
			asked: "And if there is no such connection?",
			fault: func(trafficNode) []string { return []string{"connections", "--seen-as", "192.0.2.1:40002"} },
			first: "no connection is seen as 192.0.2.1:40002: it has ended, or another node or program translates it",
			code:  exitFailed,
		},
		{
			asked: "What will this change do?",
			fault: func(n trafficNode) []string {
				n.swap(exempting("10.0.0.0/8"))
				n.start().await("config_applied")
				n.open(nfttest.TCP, "203.0.113.9:5001")
				file := filepath.Join(filepath.Dir(n.path), "NEW")
				n.check(os.WriteFile(file, []byte(exempting("10.0.0.0/8", "203.0.113.0/24")), 0o600))
				return []string{"diff", file}
			},
			first: "203.0.113.0/24: masqueraded → exempt; 1 open connection of 1 pod",
			code:  exitFailed,
		},
		{
			asked: "Did the change arrive?",
			fault: func(n trafficNode) []string {
				n.swap(exempting("10.0.0.0/8"))
				n.start().await("config_applied")
				return []string{"status"}
			},
			first: "in sync: 29fca3a8 is installed, mode nftables",
		},
		{
			asked: "And if the config is rejected?",
			fault: func(n trafficNode) []string {
				rejected(n)
				return []string{"status"}
			},
			first: "config rejected; an earlier config (29fca3a8) is installed, mode nftables",
			code:  exitFailed,
		},
		{
			asked: "Why is the pod not Ready?",
			fault: func(n trafficNode) []string {
				rejected(n)
				return []string{"ready", "--probe-socket", n.socket}
			},
			first: `not ready: config rejected: CONFIG:1:22: "10.0.0.1" is an address, not a CIDR: write "10.0.0.1/32"`,
			code:  exitFailed,
		},
		{
			asked: "Why is nothing masqueraded?",
			fault: func(n trafficNode) []string {
				n.swap("masqueradeSrcInterfaces: [cali*]")
				n.start().await("config_applied")
				return []string{"status"}
			},
			first: "nothing is masqueraded: no packet passes an interface of masqueradeSrcInterfaces (cali*)",
			code:  exitFailed,
		},
		{
			asked: "What is broken after an upgrade?",
			fault: func(n trafficNode) []string {
				loadOlder(n.test(), "ip-masq-agent-v2.9").install(n.testNode)
				n.start().await("legacy_rules_active")
				return []string{"status"}
			},
			first: "rules of an iptables-based agent are also active",
			code:  exitFailed,
		},
		{
			asked: "Do source ports run out?",
			fault: func(n trafficNode) []string {
				n.swap("toPorts: 30001-30020\n")
				n.start().await("config_applied")
				for port := range uint16(20) {
					nfttest.MustSend(n.t, n.top, nfttest.Flow{
						Proto: nfttest.UDP, From: n.top.Pod, Src: netip.AddrPortFrom(netip.Addr{}, 20001+port),
						Dst: netip.MustParseAddrPort("203.0.113.9:5001"),
					})
				}
				return []string{"status"}
			},
			first: "new udp connections to 203.0.113.9:5001 fail, or will",
			code:  exitFailed,
		},
		{
			asked: "How do we go back?",
			fault: func(n trafficNode) []string {
				d := n.start()
				d.await("config_applied")
				d.stop()
				return []string{"cleanup"}
			},
			first: "removed table inet nft-masq-agent",
		},
		{
			asked: "And if the agent still runs?",
			fault: func(n trafficNode) []string {
				n.start().await("config_applied")
				return []string{"cleanup"}
			},
			first: "nft-masq-agent cleanup: an agent runs here (pid PID) and would restore its rules: stop it first",
			code:  exitFailed,
		},
	}
}

var (
	aPID    = regexp.MustCompile(`\bpid \d+`)
	aSource = regexp.MustCompile(`192\.0\.2\.1:\d+`)
	aTime   = regexp.MustCompile(`^\d{4}-\d\d-\d\dT[\d:.]+Z`)
)

// general leaves out of a line what differs from run to run.
func (n trafficNode) general(line string) string {
	line = aPID.ReplaceAllString(strings.ReplaceAll(line, n.path, "CONFIG"), "pid PID")
	return strings.ReplaceAll(aTime.ReplaceAllString(strings.TrimSpace(line), "TIME"), filepath.Dir(n.path)+"/", "")
}

// documented fails the test unless TROUBLESHOOTING.md has a question with its answer.
func (n trafficNode) documented(asked string, args []string, first string) {
	n.t.Helper()
	quote := "`"
	if strings.Contains(first, quote) {
		quote = "``"
	}
	command := strings.ReplaceAll(n.general(strings.Join(args, " ")), " --config CONFIG", "")
	command, _, _ = strings.Cut(command, " --probe-socket")
	command = aSource.ReplaceAllString(command, "ADDRESS:PORT")
	row := fmt.Sprintf("| %s | `%s` | %s%s%s |\n", asked, command, quote, first, quote)
	if text := readDocument(n.test(), "manifests/TROUBLESHOOTING.md"); !strings.Contains(text, row) {
		n.t.Errorf("not in TROUBLESHOOTING.md:\n%s", row)
	}
}

func TestEachQuestionHasAnAnswerInOneLine(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	for _, q := range questions() {
		t.Run(q.asked, func(t *testing.T) {
			t.Parallel()
			n := newTrafficNode(t)
			args := q.fault(n)
			got := n.run(args...)
			answer := got.stdout
			if answer == "" {
				answer = got.stderr
			}
			line, _, _ := strings.Cut(answer, "\n")
			if first := n.general(line); first != q.first || got.code != q.code {
				t.Errorf("%q: exit code %d: %q\nwant %d: %q", args, got.code, first, q.code, q.first)
			}
			n.documented(q.asked, args, q.first)
		})
	}
}

func TestMonitorAnswersWhoDeletesOurRules(t *testing.T) {
	t.Parallel()
	n := newTrafficNode(t)
	n.start().await("config_applied")
	out, end := n.monitors()
	nfttest.NFT(t, n.NS, "", "flush", "ruleset")
	line, err := out.ReadString('\n')
	n.check(err)
	const first = "TIME  nft (pid PID): 9 objects in inet nft-masq-agent, this agent's rules among them"
	if got := n.general(line); got != first && strings.ReplaceAll(first, " (pid PID)", "") != got {
		t.Errorf("%q, want %q", got, first)
	}
	n.documented("Who deletes our rules?", []string{"monitor"}, first)
	end()
}

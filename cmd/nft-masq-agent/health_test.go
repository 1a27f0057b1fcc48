package main

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/health"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
)

// A fault keeps a policy from having an effect although kernel and config agree.
type fault struct {
	name, config string
	do           func(n trafficNode)
	id           string // of the problem; also that in the log and in the metric, if logs is true
	logs         bool
	first        string   // the first line of status, or its beginning
	says         []string // in the lines after it
	sees         string   // what explain says that the far end sees; "" if it cannot say
}

func faults() []fault {
	const masquerading = "nonMasqueradeCIDRs: [10.0.0.0/8]\n"
	sysctl := func(name string) func(trafficNode) {
		return func(n trafficNode) { n.check(n.top.Node.Sysctl(name, "0")) }
	}
	legacy := func(words string) func(trafficNode) {
		return func(n trafficNode) {
			w := strings.Fields(words)
			nfttest.Run(n.t, n.top.Node, "", w[0], w[1:]...)
		}
	}
	return []fault{
		{
			name: "no pod is in the policy's sources", config: masquerading + "masqueradeSrcCIDRs: [10.245.0.0/16]",
			id: health.NoPods, logs: true,
			first: "nothing is masqueraded: none of this node's 1 IPv4 pods is in masqueradeSrcCIDRs",
			says:  []string{"10.245.0.0/16 (", ":2:22)", "10.244.1.2", "add the network of the pods"}, sees: "10.244.1.2",
		},
		{
			name: "everything is exempt", config: "nonMasqueradeCIDRs: [0.0.0.0/0]", id: health.Everything, logs: true,
			first: "nothing is masqueraded: the config exempts every connection",
			says:  []string{"nonMasqueradeCIDRs has 0.0.0.0/0 (", ":1:22)"}, sees: "10.244.1.2",
		},
		{
			name: "IPv4 forwarding is off", config: masquerading, do: sysctl("net.ipv4.ip_forward"), id: health.Forwarding,
			logs: true, first: "no pod reaches another host: IPv4 forwarding is off",
			says: []string{"\n  sysctl -w net.ipv4.ip_forward=1\n"},
		},
		{
			name: "IPv6 forwarding is off", config: masquerading + "enableIPv6: true",
			do: sysctl("net.ipv6.conf.all.forwarding"), id: health.Forwarding, logs: true,
			first: "no pod reaches another host: IPv6 forwarding is off",
			says:  []string{"\n  sysctl -w net.ipv6.conf.all.forwarding=1\n"}, sees: "192.0.2.1",
		},
		{
			name:   "legacy nat",
			config: masquerading,
			do: legacy(
				"iptables-legacy -t nat -A POSTROUTING -d 203.0.113.0/24 -j SNAT --to-source 192.0.2.1",
			),
			id:    health.LegacyTables,
			logs:  true,
			first: "unknown: rules in legacy ip_tables (ip nat) decide, too",
			says:  []string{"\n  iptables-legacy -t nat -S\n", "iptables-nft"},
		},
		{
			name: "legacy filter by policy, and mangle of IPv6", config: masquerading,
			do: func(n trafficNode) {
				legacy("iptables-legacy -P FORWARD DROP")(n)
				legacy("ip6tables-legacy -t mangle -A FORWARD -j MARK --set-mark 1")(n)
			},
			id: health.LegacyTables, logs: true,
			first: "unknown: rules in legacy ip_tables (ip filter, ip6 mangle) decide, too",
			says:  []string{"\n  iptables-legacy -t filter -S\n", "\n  ip6tables-legacy -t mangle -S\n"},
		},
		{
			name: "another key of the ConfigMap",
			do: func(n trafficNode) {
				n.check(os.WriteFile(filepath.Join(filepath.Dir(n.path), "config.yaml"), []byte(masquerading), 0o644))
			},
			id: health.OtherFile, logs: true, first: "the defaults apply: the config file is missing, next to another one",
			says: []string{"/config.yaml\n  name that file (the key of the ConfigMap) ip-masq-agent, or give --config "},
			sees: "192.0.2.1",
		},
	}
}

// firstLine returns the first line of the text of status, which is never wide.
func (n *testNode) firstLine(args ...string) (first, rest string, code int) {
	n.t.Helper()
	got := n.run(append([]string{"status"}, args...)...)
	first, rest, _ = strings.Cut(got.stdout, "\n")
	if got.stderr != "" || utf8.RuneCountInString(first) > 100 {
		n.t.Errorf("status %v: %d columns: %+v", args, utf8.RuneCountInString(first), got)
	}
	return first, "\n" + rest, got.code
}

func TestStatusIsGreenOnlyIfThePolicyHasAnEffect(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "iptables-legacy", "ip6tables-legacy")
	for _, f := range faults() {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			n := newTrafficNode(t)
			if f.config != "" {
				n.swap(f.config)
			}
			if f.do != nil {
				f.do(n)
			}
			d := n.start("--http-address", httpAddress)
			d.await("config_applied")
			first, rest, code := n.firstLine()
			if code != exitFailed || !strings.HasPrefix(first, f.first) {
				t.Errorf("exit code %d, first line %q, want %q", code, first, f.first)
			}
			for _, text := range f.says {
				if !strings.Contains(rest, text) {
					t.Errorf("%q is not in%s", text, rest)
				}
			}
			r, code := n.status()
			if code != exitFailed || len(problems(r, f.id)) != 1 || r.Errors[0].ID != f.id ||
				!slices.ContainsFunc(r.Areas, func(a answer.Area) bool { return !a.OK && a.Text == r.Errors[0].Msg }) {
				t.Errorf("exit code %d: %+v", code, r)
			}
			if f.logs {
				line := d.await("node_problem")
				if line["problem"] != f.id || line["level"] != "warn" || line["why"] != r.Errors[0].Error() {
					t.Errorf("the agent logs %v", line)
				}
				if m := n.metric(fmt.Sprintf("nft_masq_agent_node_problem{problem=%q}", f.id)); m != "1" {
					t.Errorf("the metric is %q", m)
				}
			}
			if x, _ := n.explained("203.0.113.9", "--from", "10.244.1.2"); x.Sees != f.sees && f.id != health.Forwarding {
				t.Errorf("explain says that the far end sees %q, want %q: %s", x.Sees, f.sees, x.Headline)
			}
			if f.sees != "" {
				if sees := n.seen(netip.MustParseAddr("203.0.113.9"), 5000); sees.String() != f.sees {
					t.Errorf("the far end sees %s, want %s", sees, f.sees)
				}
			}
		})
	}
}

// What an open connection shows is all that is known.
func TestLegacyTablesMakeTheHeadlineUnknown(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-legacy")
	n := newTrafficNode(t)
	n.enforce("nonMasqueradeCIDRs: [10.0.0.0/8]")
	nfttest.Run(t, n.top.Node, "", "iptables-legacy", strings.Fields(
		"-t nat -A POSTROUTING -d 10.9.0.0/16 -j SNAT --to-source 192.0.2.1")...)
	if sees := n.seen(netip.MustParseAddr("10.9.0.9"), 5000); sees != n.top.NodeV4 {
		t.Fatalf("the far end sees %s: the test shows nothing", sees)
	}
	args := append([]string{"10.9.0.9", "--from", "10.244.1.2"}, *n.flags...)
	x, _ := n.explained(args...)
	const headline = "unknown: rules in legacy ip_tables (ip nat) decide, too"
	if x.Headline != headline || x.Why.Code != "unknown" || x.Sees != "" ||
		!strings.Contains(x.Details, "\niptables-legacy -t nat -S\n") ||
		!slices.Contains(x.Possible, "1 open connection is seen as 192.0.2.1") {
		t.Errorf("%+v", x)
	}
	text := n.run(append([]string{"explain"}, args...)...).stdout
	if !strings.HasPrefix(text, headline+"\n") || !strings.Contains(text, "\n  iptables-legacy -t nat -S\n") {
		t.Errorf("%s", text)
	}
	if x, _ := n.explained(append([]string{"2001:db8:1::1"}, *n.flags...)...); strings.Contains(x.Headline, "unknown") {
		t.Errorf("IPv6, which has no such table: %s", x.Headline)
	}
}

func TestStatusSaysThatNoAgentRuns(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.swap("")
	d := n.start()
	d.began(wants(t, ""))
	if first, _, code := n.firstLine(); code != exitDone || !strings.HasPrefix(first, "in sync: ") {
		t.Errorf("exit code %d: %s", code, first)
	}
	d.stop()
	first, rest, code := n.firstLine("--config", n.path)
	if code != exitFailed || first != "no agent runs on this node" ||
		!strings.Contains(rest, "\n  kubectl -n kube-system ") {
		t.Errorf("exit code %d: %s%s", code, first, rest)
	}
}

func TestStatusSaysHowOftenRulesWereRestored(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	n := newNode(t)
	d := n.start()
	d.began(wants(t, ""))
	for range 3 {
		nfttest.NFT(t, n.NS, "", "flush", "chain", "inet", nft.TableName, "postrouting")
		d.await("rules_restored")
	}
	first, rest, code := n.firstLine()
	if code != exitFailed || first != "another program keeps changing the rules: restored 3 times in the last minute" ||
		!strings.Contains(rest, "\n  nft-masq-agent monitor shows which program it is\n") {
		t.Errorf("exit code %d: %s%s", code, first, rest)
	}
}

// In the namespace of a pod, because hostNetwork is missing.
func TestStatusSaysThatThisIsNotTheNode(t *testing.T) {
	t.Parallel()
	top := nfttest.NewTopology(t)
	n := nodeIn(t, top.Pod)
	n.swap("")
	d := n.start()
	d.began(wants(t, ""))
	first, rest, code := n.firstLine()
	if code != exitFailed || first != "this is not the node's network namespace" ||
		!strings.Contains(rest, "only way out is eth0") ||
		!strings.Contains(rest, "hostNetwork: true") {
		t.Errorf("exit code %d: %s%s", code, first, rest)
	}
	// Whoever translates there, too, knows that it is a node, such as kube-proxy in a container.
	nfttest.NFT(t, n.NS, "add table ip other; add chain ip other n { type nat hook prerouting priority -100; }", "-f", "-")
	if first, _, code := n.firstLine(); code != exitDone || !strings.HasPrefix(first, "in sync: ") {
		t.Errorf("next to another program's NAT: exit code %d: %s", code, first)
	}
}

func TestStatusSaysThatItCannotReadTheAgentsFlags(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.swap(exempting("10.1.0.0/16"))
	d := n.start("--probe-socket", n.socket+"-elsewhere", "--to-ports", "1024-2047")
	d.began(wants(t, exempting("10.1.0.0/16"), "--to-ports", "1024-2047"))
	_, rest, code := n.firstLine("--resync-interval", "60")
	want := fmt.Sprintf("cannot read the flags of the agent (pid %d): give --config or --probe-socket", d.Pid)
	if code != exitFailed || !strings.Contains(rest, want) || strings.Contains(rest, "for who changes them") {
		t.Errorf("exit code %d: %s", code, rest)
	}
}

package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/health"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
)

// A fault is caused on a node, where the first line of a command says what is wrong.
type fault struct {
	name, config string
	args         []string          // of the agent; SOCKET and DIR are the node's
	mount        bool              // the config as a single file
	do           func(*faultyNode) // before the agent starts
	then         func(*faultyNode) // once it enforces the config
	id           string            // of the problem of status
	logs         bool              // so do the log and the metric
	command      string            // "": status
	code         int               // exit code
	first        string            // the first line, or its beginning
	says         []string          // in the lines after it
	dst          string            // of explain, "": 203.0.113.9
	// sees is what the far end sees, and explain says so; "" if nothing arrives. unknown: explain says
	// that it does not know.
	sees    string
	unknown bool
}

// A faultyNode is a node on which a fault is caused.
type faultyNode struct {
	trafficNode
	d *daemon // nil if none runs
}

// runs starts another program on the node.
func runs(words string) func(*faultyNode) {
	return func(n *faultyNode) {
		w := strings.Fields(words)
		nfttest.Run(n.t, n.NS, "", w[0], w[1:]...)
	}
}

// rules loads a table of another program.
func rules(chain string) func(*faultyNode) {
	return func(n *faultyNode) { n.nft("table ip x { " + chain + "; }") }
}

func faults() []fault {
	const masquerading = "nonMasqueradeCIDRs: [10.0.0.0/8]\n"
	const own, node = "10.244.1.2", "192.0.2.1"
	const legacy = "unknown: rules in legacy ip_tables "
	sysctl := func(name, value string) func(*faultyNode) {
		return func(n *faultyNode) { n.check(n.NS.Sysctl(name, value)) }
	}
	sends := func(times int) func(*faultyNode) {
		return func(n *faultyNode) {
			for range times {
				n.seen(netip.MustParseAddr("203.0.113.9"), 5001)
			}
		}
	}
	all := func(steps ...func(*faultyNode)) func(*faultyNode) {
		return func(n *faultyNode) {
			for _, step := range steps {
				step(n)
			}
		}
	}
	swaps := func(text, event string) func(*faultyNode) {
		return func(n *faultyNode) { n.swap(text); n.d.await(event) }
	}
	stops := func(n *faultyNode) { n.d.stop(); n.d = nil }
	service := func(masqueradeAll bool, endpoints ...string) func(*faultyNode) {
		return func(n *faultyNode) {
			_, rules := kubeProxy("nftables", masqueradeAll, endpoints...)
			n.nft(rules)
		}
	}
	return []fault{
		{
			name: "no pod is in the policy's sources", config: masquerading + "masqueradeSrcCIDRs: [10.245.0.0/16]",
			id: health.NoPods, logs: true, code: 1,
			first: "nothing is masqueraded: none of this node's 1 IPv4 pods is in masqueradeSrcCIDRs",
			says:  []string{"10.245.0.0/16 (", ":2:22)", "10.244.1.2", "add the network of the pods"}, sees: own,
		},
		{
			name: "no pod is in the sources, in explain", config: masquerading + "masqueradeSrcCIDRs: [10.245.0.0/16]",
			command: "explain 203.0.113.9:443 --from 10.244.1.2",
			first:   "203.0.113.9:443 sees 10.244.1.2, the source's own address",
			says:    []string{"in masqueradeSrcCIDRs  no: not masqueraded\n     (DIR/ip-masq-agent:2:22: 10.245.0.0/16)\n"},
			sees:    own,
		},
		{
			name: "everything is exempt", config: "nonMasqueradeCIDRs: [0.0.0.0/0]", id: health.Everything, logs: true, code: 1,
			first: "nothing is masqueraded: the config exempts every connection",
			says:  []string{"nonMasqueradeCIDRs has 0.0.0.0/0 (", ":1:22)"}, sees: own,
		},
		{
			name: "routing rules lead pods to less than is exempt", config: masquerading,
			do: runs("ip rule add from 10.244.1.2 to 10.244.0.0/16 lookup 2"), id: health.RoutingRules,
			first: "pods keep their address to 10.0.0.0/8, but no routing rule from 10.244.1.2 leads there",
			says:  []string{" to 10.244.0.0/16 lookup 2\n", "AWS_VPC_K8S_CNI_EXCLUDE_SNAT_CIDRS"}, sees: node,
		},
		{
			name: "IPv4 forwarding is off", config: masquerading, do: sysctl("net.ipv4.ip_forward", "0"), id: health.Forwarding,
			logs: true, code: 1, first: "no pod reaches another host: IPv4 forwarding is off",
			says: []string{"\n  sysctl -w net.ipv4.ip_forward=1\n"},
		},
		{
			name: "IPv4 forwarding is off, in explain", config: masquerading, do: sysctl("net.ipv4.ip_forward", "0"),
			command: "explain 203.0.113.9", first: "203.0.113.9 sees nothing: this node forwards no packets.",
			says: []string{"\n  sysctl -w net.ipv4.ip_forward=1\n"},
		},
		{
			name: "IPv6 forwarding is off", config: masquerading + "enableIPv6: true",
			do: sysctl("net.ipv6.conf.all.forwarding", "0"), id: health.Forwarding, logs: true, code: 1,
			first: "no pod reaches another host: IPv6 forwarding is off",
			says:  []string{"\n  sysctl -w net.ipv6.conf.all.forwarding=1\n"}, dst: "2001:db8:1::1",
		},
		{
			name: "legacy nat", config: masquerading,
			do: runs("iptables-legacy -t nat -A POSTROUTING -d 203.0.113.0/24 -j SNAT --to-source 192.0.2.1"),
			id: health.LegacyTables, logs: true, code: 1, first: legacy + "(ip nat) decide, too",
			says: []string{"\n  iptables-legacy -t nat -S\n", "iptables-nft"}, sees: node, unknown: true,
		},
		{
			name: "legacy nat of what is exempt, in explain", config: masquerading,
			do:      runs("iptables-legacy -t nat -A POSTROUTING -d 10.9.0.0/16 -j MASQUERADE"),
			command: "explain 10.9.0.9", first: legacy + "(ip nat) decide, too",
			says: []string{"\n  iptables-legacy -t nat -S\n"}, dst: "10.9.0.9", sees: node, unknown: true,
		},
		{
			name: "legacy filter by policy, and mangle of IPv6", config: masquerading,
			do: all(runs("iptables-legacy -P FORWARD DROP"),
				runs("ip6tables-legacy -t mangle -A FORWARD -j MARK --set-mark 1")),
			id: health.LegacyTables, logs: true, code: 1, first: legacy + "(ip filter, ip6 mangle) decide, too",
			says:    []string{"\n  iptables-legacy -t filter -S\n", "\n  ip6tables-legacy -t mangle -S\n"},
			unknown: true,
		},
		{
			name: "legacy raw turns off connection tracking", config: masquerading,
			do: runs("iptables-legacy -t raw -A PREROUTING -j CT --notrack"), id: health.LegacyTables, logs: true, code: 1,
			first: legacy + "(ip raw) decide, too", says: []string{"\n  iptables-legacy -t raw -S\n"}, sees: own, unknown: true,
		},
		{
			name: "another key of the ConfigMap",
			do: func(n *faultyNode) {
				n.check(os.WriteFile(filepath.Join(filepath.Dir(n.path), "config.yaml"), []byte(masquerading), 0o644))
			},
			id: health.OtherFile, logs: true, code: 1,
			first: "the defaults apply: the config file is missing, next to another one",
			says:  []string{"/config.yaml\n  name that file (the key of the ConfigMap) ip-masq-agent, or give --config "},
			sees:  node,
		},
		{
			name: "the config is mounted by subPath", config: masquerading, mount: true, id: health.SingleFile, logs: true,
			code: 1, first: "the config does not follow its source when that is replaced",
			says: []string{"it is mounted as a single file (subPath)", "mount the directory instead of the file"}, sees: node,
		},
		{
			name: "no agent runs", config: masquerading, then: stops, id: "no-agent", code: 1,
			first: "no agent runs on this node", says: []string{"\n  kubectl -n kube-system "}, sees: node,
		},
		{
			name: "no agent runs, and another program deleted the rules", config: masquerading,
			then: all(stops, runs("nft delete table inet nft-masq-agent")), id: "out-of-sync", code: 1,
			first: "out of sync: none of our rules are installed", says: []string{"start it, or check that it runs"}, sees: own,
		},
		{
			name: "another program keeps flushing the rules", config: masquerading,
			then: func(n *faultyNode) {
				for range 3 {
					runs("nft flush chain inet nft-masq-agent postrouting")(n)
					n.d.await("rules_restored")
				}
			},
			id: "rules-restored", code: 1,
			first: "another program keeps changing the rules: restored 3 times in the last minute",
			says:  []string{"\n  nft-masq-agent monitor shows which program it is\n"}, sees: node,
		},
		{
			name: "the agent's socket is elsewhere", config: masquerading,
			args: []string{"--probe-socket", "SOCKET-elsewhere", "--to-ports", "1024-2047"}, id: "out-of-sync", code: 1,
			command: "status --resync-interval 60", first: "out of sync: installed: ",
			says: []string{"\n  cannot read the flags of the agent (pid ", "): give --config or --probe-socket\n"}, sees: node,
		},
		{
			name: "a bad edit", config: masquerading, then: swaps(badText, "config_rejected"), id: "config-rejected", code: 1,
			first: "config rejected; an earlier config (", says: []string{"\n  fix DIR/ip-masq-agent:"}, sees: node,
		},
		{
			name: "an item that is indented too far", config: masquerading,
			then:    swaps("nonMasqueradeCIDRs:\n- 10.0.0.0/8\n  - 192.168.0.0/16\n", "config_rejected"),
			command: "check --config DIR/ip-masq-agent", code: 1, first: "DIR/ip-masq-agent:3:", sees: node,
		},
		{
			name: "IPv6 is off", config: masquerading, first: "in sync: ",
			says: []string{"IPv6 is off: pods keep their IPv6 addresses (1 here, such as fd00:10:244:1::2)"},
			dst:  "2001:db8:1::1", sees: "fd00:10:244:1::2",
		},
		{
			name: "replies are dropped by rp_filter", config: masquerading,
			then:    all(sysctl("net.ipv4.conf.eth0.rp_filter", "1"), sends(1)),
			command: "explain 203.0.113.9", first: "203.0.113.9 sees 192.0.2.1, the address of eth0: masqueraded by this agent.",
			says: []string{" have no reply, and rp_filter of eth0 is strict (1)", "net.ipv4.conf.eth0.rp_filter=2"}, sees: node,
		},
		{
			name: "replies are dropped by rp_filter, in connections", config: masquerading,
			then:    all(sysctl("net.ipv4.conf.eth0.rp_filter", "1"), sends(1)),
			command: "connections", first: "PROTO",
			says: []string{" have no reply, and rp_filter of eth0 is strict (1)"}, sees: node,
		},
		{
			name: "the source ports for a destination are used up", config: masquerading + "toPorts: 20000-20003",
			then: sends(4), id: "source-ports", code: 1, first: "new udp connections to 203.0.113.9:5001 fail, or will",
			says: []string{"4 of 4 source ports of 192.0.2.1", "\n  nft-masq-agent connections 203.0.113.9 "}, sees: node,
		},
		{
			name: "an older agent's rules", config: masquerading, do: func(n *faultyNode) { n.nft(staleChain) },
			id: "older-agent", code: 1, first: "rules of an iptables-based agent are also active",
			says: []string{"--takeover"}, sees: node,
		},
		{
			name: "another program masquerades what is exempt", config: masquerading,
			then: rules("chain c { type nat hook postrouting priority 90; ip saddr 10.244.1.0/24 masquerade; }"),
			id:   "conflict", code: 1, first: "1 rule of other programs masquerades traffic that the config exempts",
			says: []string{"such as ip x c handle 2\n", "enforceNonMasquerade"}, dst: "10.9.0.9", sees: node,
		},
		{
			name: "another program translates first", config: masquerading,
			then: rules("chain c { type nat hook postrouting priority 90; ip daddr 203.0.113.0/24 snat to 192.0.2.77; }"),
			id:   "overruled", code: 1, first: "1 rule of other programs translates traffic that the config masquerades",
			sees: "192.0.2.77",
		},
		{
			name: "another program turns off connection tracking", config: masquerading,
			then: rules("chain c { type filter hook prerouting priority -300; ip saddr 10.244.1.0/24 notrack; }"),
			id:   "overruled", code: 1, first: "1 rule of other programs turns off connection tracking for traffic that ",
			sees: own,
		},
		{
			name: "another program writes an address", config: masquerading,
			then: rules("chain c { type filter hook postrouting priority 120; ip saddr set 192.0.2.77; }"),
			id:   "overruled", code: 1, first: "1 rule of other programs writes a source address into traffic that ",
			sees: "192.0.2.77",
		},
		{
			name: "forwarding is dropped by a policy", config: masquerading,
			then: rules("chain c { type filter hook forward priority 0; policy drop; }"),
			id:   "overruled", code: 1, first: "1 rule of other programs drops traffic that the config masquerades",
			says: []string{"set its policy to accept"},
		},
		{
			name: "one destination is dropped", config: masquerading,
			then:    rules("chain c { type filter hook forward priority 0; ip daddr 203.0.113.9 drop; }"),
			command: "explain 203.0.113.9", first: "203.0.113.9 sees nothing: a rule drops the connection",
			says: []string{"\n  nft delete rule ip x c handle 2\n"},
		},
		{
			name: "kube-proxy masquerades all", config: masquerading, then: service(true, "10.9.0.9"),
			command: "explain 10.96.0.10:5300 --protocol udp",
			first:   "10.9.0.9, the endpoint of 10.96.0.10:5300, sees 192.0.2.1",
			says:    []string{"It is a rule of kube-proxy", "--masquerade-all"}, dst: "10.96.0.10:5300", sees: node,
		},
		{
			name: "open connections contradict explain", config: "nonMasqueradeCIDRs: [203.0.113.0/24]",
			then:    all(sends(1), swaps(masquerading, "config_applied")),
			command: "explain 203.0.113.9", first: "203.0.113.9 sees 192.0.2.1, the address of eth0: masqueraded by this agent.",
			says: []string{"\n  udp 10.244.1.2:", " to 203.0.113.9:5001 is seen as 10.244.1.2:"}, sees: node,
		},
		{
			name: "connections have an address of before", config: "nonMasqueradeCIDRs: [203.0.113.0/24]",
			then: all(sends(1), swaps(masquerading, "config_applied")), id: "stale-connections",
			code: 1, first: "1 connection still uses an earlier policy",
			says: []string{"\n  nft-masq-agent connections --stale lists them\n"}, sees: node,
		},
		{
			name: "the node has none of snatAddresses", config: masquerading + "snatAddresses: [192.0.2.99]",
			id: "snat-missing", code: 1, first: "this node has none of snatAddresses", sees: node,
		},
		{
			name: "a list of interfaces matches nothing", config: masquerading + "masqueradeSrcInterfaces: [cni0]",
			id: "interface-list-unmatched", code: 1, first: "nothing is masqueraded", sees: own,
		},
		{
			name: "there is no route", config: masquerading, then: runs("ip route del default"),
			command: "explain 203.0.113.9", first: "This node has no route to 203.0.113.9.",
		},
		{
			name: "pods see each other masqueraded", config: "nonMasqueradeCIDRs: [192.168.0.0/16]\n",
			command: "status --pod-cidr 10.244.0.0/16", id: "pod-cidr-not-exempt", code: 1, first: "",
			dst: "10.244.7.7", sees: node,
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

// The first line says what is wrong, the next ones what to do, and explain never the opposite of what
// the far end sees.
func TestEachFaultHasAFirstLine(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "iptables-legacy", "ip6tables-legacy", "nft", "ip")
	for _, f := range faults() {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			n := &faultyNode{trafficNode: newTrafficNode(t)}
			here := strings.NewReplacer("SOCKET", n.socket, "DIR", filepath.Dir(n.path)).Replace
			if f.config != "" {
				n.swap(f.config)
			}
			command, env := strings.Fields(here(cmp.Or(f.command, "status"))), []string(nil)
			if f.mount {
				source := filepath.Join(t.TempDir(), "source")
				n.check(os.WriteFile(source, []byte(f.config), 0o644))
				env = append(env, withMount+"="+source+":"+n.path)
			}
			if f.do != nil {
				f.do(n)
			}
			args := []string{"--http-address", httpAddress}
			for _, a := range f.args {
				args = append(args, here(a))
			}
			n.d = n.startIn(env, args...)
			n.d.await("config_applied")
			if f.then != nil {
				f.then(n)
			}
			ask := func(words ...string) result {
				if n.d == nil { // there are no flags to ask for
					words = append(words, "--config", n.path)
				}
				return n.runIn(env, words...)
			}
			got := ask(command...)
			first, rest, _ := strings.Cut(got.stdout+got.stderr, "\n")
			t.Logf("| %s | %s | %s | %d |", f.name, strings.Join(command, " "), first, got.code)
			if got.code != f.code || !strings.HasPrefix(first, here(f.first)) ||
				f.command == "" && utf8.RuneCountInString(first) > 100 {
				t.Errorf("exit code %d, want %d, first line %q, want %q", got.code, f.code, first, here(f.first))
			}
			for _, text := range f.says {
				if !strings.Contains("\n"+rest, here(text)) {
					t.Errorf("%q is not in\n%s", here(text), rest)
				}
			}
			n.hasProblem(f, ask)
			n.explainsWhatIsSeen(f, ask)
		})
	}
}

// hasProblem checks that status, the log and the metric have the problem.
func (n *faultyNode) hasProblem(f fault, ask func(...string) result) {
	n.t.Helper()
	if f.id == "" {
		return
	}
	var r answer.Status
	words := append(strings.Fields(cmp.Or(f.command, "status")), "-o", "json")
	n.check(json.Unmarshal([]byte(ask(words...).stdout), &r))
	found := append(r.Errors, r.Warnings...)
	if len(found) == 0 || found[0].ID != f.id || !slices.ContainsFunc(r.Areas, func(a answer.Area) bool {
		return !a.OK && a.Text == found[0].Msg
	}) {
		n.t.Fatalf("%+v", r)
	}
	if !f.logs {
		return
	}
	line := n.d.await("node_problem")
	if line["problem"] != f.id || line["level"] != "warn" || line["why"] != found[0].Error() {
		n.t.Errorf("the agent logs %v", line)
	}
	if m := n.metric(fmt.Sprintf("nft_masq_agent_node_problem{problem=%q}", f.id)); m != "1" {
		n.t.Errorf("the metric is %q", m)
	}
}

// explainsWhatIsSeen compares explain with the far end.
func (n *faultyNode) explainsWhatIsSeen(f fault, ask func(...string) result) {
	n.t.Helper()
	dst, src := cmp.Or(f.dst, "203.0.113.9"), n.top.PodV4
	to, err := netip.ParseAddrPort(dst)
	if err != nil {
		to = netip.AddrPortFrom(netip.MustParseAddr(dst), 5002)
	}
	if to.Addr().Is6() {
		src = n.top.PodV6
	}
	words := []string{"explain", dst, "--from", src.String(), "-o", "json"}
	if dst == to.String() {
		words = append(words, "--protocol", "udp")
	}
	var x answer.Explanation
	n.check(json.Unmarshal([]byte(ask(words...).stdout), &x))
	flow := nfttest.Flow{Proto: nfttest.UDP, From: n.top.Pod, To: n.top.Outside, Dst: to}
	if f.sees == "" {
		flow.Timeout = 500 * time.Millisecond // nothing arrives; on a busy machine it sees less, not more
	}
	s, err := n.top.Send(flow)
	switch {
	case err != nil && !errors.Is(err, nfttest.ErrNotSeen):
		n.t.Fatal(err)
	case err == nil && s.Seen.Addr().String() != f.sees || (err != nil) != (f.sees == ""):
		n.t.Errorf("the far end sees %s (%v), want %q", s.Seen, err, f.sees)
	case (x.Why.Code == "unknown") != f.unknown || !f.unknown && x.Sees != f.sees:
		n.t.Errorf("the far end sees %q, but explain says %q: %s", f.sees, x.Sees, x.Headline)
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

// In the namespace of a pod, because hostNetwork is missing.
func TestStatusSaysThatThisIsNotTheNode(t *testing.T) {
	t.Parallel()
	inEachMode(t, func(t *testing.T, _ nft.Mode, flag string) {
		top := nfttest.NewTopology(t)
		n := nodeIn(t, top.Pod)
		n.swap("")
		says := func(when string) {
			t.Helper()
			first, rest, code := n.firstLine(flag)
			if code != exitFailed || first != "this is not the node's network namespace" ||
				!strings.Contains(rest, "only way out is eth0") || !strings.Contains(rest, "hostNetwork: true") {
				t.Errorf("%s: exit code %d: %s%s", when, code, first, rest)
			}
		}
		says("without an agent")
		d := n.start(flag)
		d.await("config_applied")
		says("with one")
		// Whoever translates there, too, knows that it is a node, such as kube-proxy in a container.
		nfttest.NFT(t, n.NS, "add table ip other; add chain ip other n { type nat hook prerouting priority -100; "+
			"tcp dport 80 redirect; }", "-f", "-")
		if first, _, code := n.firstLine(flag); code != exitDone || !strings.HasPrefix(first, "in sync: ") {
			t.Errorf("next to another program's NAT: exit code %d: %s", code, first)
		}
	})
}

// An agent that is stopped heals nothing.
func TestStatusSaysThatTheAgentIsStuck(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.swap("")
	d := n.start()
	d.await("config_applied")
	d.signal(unix.SIGSTOP)
	first, rest, code := n.firstLine("--config", n.path)
	d.signal(unix.SIGCONT)
	if code != exitFailed || !strings.HasPrefix(first, "the agent is stuck (pid ") ||
		!strings.Contains(rest, "agent           wrong") {
		t.Errorf("exit code %d: %s%s", code, first, rest)
	}
}

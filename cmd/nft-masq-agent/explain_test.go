package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/report"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfttest"
)

func explainJSON(t *testing.T, args ...string) answer.Explanation {
	t.Helper()
	got := runHere(t, append([]string{"explain", "-o", "json"}, args...)...)
	var x answer.Explanation
	if err := json.Unmarshal([]byte(got.stdout), &x); err != nil || got.code != exitDone {
		t.Fatalf("%v: %+v: %v", args, got, err)
	}
	return x
}

func TestAddressesOfTheNodeAreLocal(t *testing.T) {
	for dst, want := range map[string]nft.Verdict{
		"192.0.2.1":          nft.Local,
		"192.0.2.2":          nft.Masqueraded,
		"127.0.0.1":          nft.Local,
		"127.8.8.8":          nft.Local,
		"::1":                nft.Local,
		"2001:db8::1":        nft.Local,
		"2001:db8::2":        nft.Masqueraded,
		"::ffff:192.0.2.1":   nft.Local,
		"fe80::1%eth0":       nft.Exempt,
		"::ffff:203.0.113.1": nft.Masqueraded,
	} {
		x := explainJSON(t, dst, "--enable-ipv6")
		if len(x.Answers) != 1 || x.Answers[0].Verdict != want {
			t.Errorf("%s: %+v, want %s", dst, x.Answers, want)
		}
	}
}

func TestExplainNotesSurprises(t *testing.T) {
	const (
		many     = "Multicast and broadcast are masqueraded too, as with the older agents."
		itself   = "The packet is from 192.0.2.1, this node itself: --from asks about another."
		fromNode = "The source is this node; its own traffic is masqueraded too."
		elsewise = "Another rule on the node may still masquerade it."
		lasting  = "This applies to new connections; existing connections keep their address."
	)
	tests := []struct {
		args []string
		want []string
	}{
		{[]string{"203.0.113.9"}, []string{itself, fromNode, lasting}},
		{[]string{"203.0.113.9", "--from", "10.1.2.3"}, []string{lasting}},
		{[]string{"203.0.113.9", "--from", "192.0.2.1"}, []string{fromNode, lasting}},
		{[]string{"224.0.0.251"}, []string{itself, many, fromNode, lasting}},
		{[]string{"255.255.255.255", "--from", "10.1.2.3"}, []string{many, lasting}},
		{[]string{"192.0.2.255", "--from", "10.1.2.3"}, []string{many, lasting}},
		{[]string{"192.0.2.254", "--from", "10.1.2.3"}, []string{lasting}},
		{[]string{"ff02::fb", "--enable-ipv6", "--from", "fd00::1"}, []string{many, lasting}},
		{[]string{"10.1.2.3"}, []string{itself, elsewise, lasting}},
		{[]string{"127.0.0.1", "--from", "10.1.2.3"}, []string{lasting}},
	}
	for _, tt := range tests {
		notes := explainJSON(t, tt.args...).Notes
		if got := strings.Split(notes.Error(), "\n"); !slices.Equal(got, tt.want) {
			t.Errorf("%v: %q, want %q", tt.args, got, tt.want)
		}
	}
}

// What a pod sends to many does not leave the node.
func TestExplainKnowsWhatIsNotForwarded(t *testing.T) {
	t.Parallel()
	n := newTrafficNode(t)
	n.enforce("", "--enable-ipv6")
	for dst, from := range map[string]netip.Addr{
		"224.0.0.1": n.top.PodV4, "239.1.2.3": n.top.PodV4, "192.0.2.255": n.top.PodV4, "255.255.255.255": n.top.PodV4,
		"ff05::7": n.top.PodV6,
	} {
		x, text := n.explained(dst, "--from", from.String(), "--enable-ipv6", "--config", n.path)
		if x.Why.Code != "dropped" || !strings.HasPrefix(x.Headline, dst+" sees nothing: this node forwards no ") {
			t.Errorf("%s: %s", dst, text)
		}
	}
}

// answerAs answers on a socket like an agent.
func answerAs(t *testing.T, report report.Report) (socket string) {
	t.Helper()
	socket = newSocket(t)
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(report)
	})}
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() { _ = server.Close() })
	return socket
}

func TestExplainUsesFlagsAndFileOfTheRunningAgent(t *testing.T) {
	conf := filepath.Join(t.TempDir(), "conf")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(conf, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	explain := func(report report.Report, args string) (code int, text string) {
		t.Helper()
		var out strings.Builder
		e := testEnvironment(t, &out, &out)
		e.socket = answerAs(t, report)
		code = dispatch(t.Context(), testCommands(), strings.Fields("explain 2001:db8::2 "+args), e)
		return code, strings.Join(strings.Fields(out.String()), " ")
	}
	write("nonMasqueradeCIDRs: ['2001:db8::/32']\n")
	report := report.Report{
		PID: 9, Args: []string{"--config", "conf", "--enable-ipv6", "--random-fully=false"},
		ConfigPath: conf,
	}
	for args, want := range map[string][]string{
		"": {
			"not masqueraded", " " + conf + ":1:22 ",
			fmt.Sprintf("with the flags of the running agent (pid %d) ", os.Getpid()),
		},
		"-v 1": {
			fmt.Sprintf("with the flags of the running agent (pid %d: --config conf --enable-ipv6 --random-fully=false)",
				os.Getpid()),
		},
		"--masq-chain X":         {" " + conf + ":1:22 "},
		"--enable-ipv6=false":    {"IPv6 is disabled (set enableIPv6)"},
		"--config /dev/null":     {"/dev/null"},
		"--probe-socket /nosuch": {"IPv6 is disabled (set enableIPv6)"},
	} {
		_, text := explain(report, args)
		for _, w := range want {
			if !strings.Contains(text, w) {
				t.Errorf("%s: %q is not in:\n%s", args, w, text)
			}
		}
	}
	report.Args = append(report.Args, "--from-the-future")
	if _, text := explain(report, ""); !strings.Contains(text, "without the flags of the running agent (pid ") {
		t.Errorf("unknown flags: %s", text)
	}
	report.Args = []string{"--enable-ipv6"}
	write("masqLinkLocal: 5\n")
	if code, text := explain(report, ""); code != exitFailed ||
		!strings.Contains(text, fmt.Sprintf("(pid %d) ", os.Getpid())+conf+":1:16: ") {
		t.Errorf("a bad file: exit code %d: %s", code, text)
	}
}

// A source is received on the interface of the route back to it; packets leave by
// the interface of their route, or by that of --out.
func TestExplainUsesTheInterfacesOfTheRoutes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config")
	text := "masqueradeSrcInterfaces: [cni0]\nnonMasqueradeOutInterfaces: [\"wg*\"]\nmasqueradeOutInterfaces: [eth0]\n"
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		args string
		want nft.Verdict
		by   string // place
	}{
		{"--from 10.244.1.5", nft.Masqueraded, ""},
		{"--from 10.244.1.5 --out wg0", nft.Exempt, path + ":2:30"},
		{"--from 10.244.1.5 --out bond0", nft.Exempt, path + ":3:27"},
		{"--from 203.0.113.7", nft.Exempt, path + ":1:27"},
		{"--from 192.0.2.1", nft.Exempt, path + ":1:27"},
	} {
		x := explainJSON(t, append([]string{"198.51.100.7", "--config", path}, strings.Fields(tt.args)...)...)
		a := x.Answers[0]
		if place := a.Steps[len(a.Steps)-1].Place; a.Verdict != tt.want || tt.by != "" && place.String() != tt.by ||
			(tt.by == "") != (place == config.Position{}) {
			t.Errorf("%s: %s by %q, want %s by %q", tt.args, a.Verdict, place, tt.want, tt.by)
		}
	}
}

// forgetPods deletes what tells a node which pods it has.
func (n trafficNode) forgetPods() {
	n.t.Helper()
	for _, line := range []string{"route del 10.244.1.2 dev pod0", "neigh flush dev pod0 nud all"} {
		nfttest.Run(n.t, n.NS, "", "ip", strings.Fields(line)...)
	}
}

// Without --from, it is from a pod of the policy's, or else from the node.
func TestExplainIsAboutOnePacketThatItNames(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "ip")
	const config = "masqueradeSrcCIDRs: [10.244.0.0/16]\nsnatRules:\n" +
		"- {from: [10.244.1.3/32], addresses: [198.51.100.211]}\n"
	n := newTrafficNode(t)
	n.check(n.top.AddAddr(n.top.Node, netip.MustParseAddr("198.51.100.211")))
	n.swap(config)
	k := n.kernel()
	_, err := k.Apply(t.Context(), wants(t, config).On(addrs("198.51.100.211")), layout.Ours)
	n.check(errors.Join(err, k.Close()))
	says := func(when, from, sees string, want ...string) {
		t.Helper()
		x, text := n.explained("203.0.113.9", "--config", n.path)
		if x.Source != from || x.Sees != sees || len(x.Answers) != 1 || x.Answers[0].Source != from {
			t.Errorf("%s: from %s it sees %q:\n%s", when, x.Source, x.Sees, text)
		}
		for _, w := range want {
			if !strings.Contains(text, w) {
				t.Errorf("%s: %q is not in:\n%s", when, w, text)
			}
		}
	}
	says("a pod", "10.244.1.2", "192.0.2.1", "203.0.113.9 sees 192.0.2.1, the address of eth0: masqueraded by",
		"The packet is from 10.244.1.2, a pod of this node: --from asks about another.")
	for _, a := range addrs("10.243.1.6", "10.244.1.7") {
		n.check(n.top.AddAddr(n.top.Pod, a))
	}
	n.forgetPods()
	says("one of another program", "10.244.1.7", "192.0.2.1")
	nfttest.Run(t, n.NS, "", "ip", "route", "del", "10.244.1.7", "dev", "pod0")
	n.check(n.top.AddAddr(n.top.Pod, netip.MustParseAddr("10.244.1.3")))
	says("with an entry", "10.244.1.3", "198.51.100.211",
		fmt.Sprintf("The source address is that of entry 1 of snatRules (%s:3:3)", n.path))
	nfttest.Run(t, n.NS, "", "ip", "route", "del", "10.244.1.3", "dev", "pod0")
	nfttest.Run(t, n.NS, "", "ip", "neigh", "flush", "dev", "pod0", "nud", "all")
	says("no pod is known", "192.0.2.1", "192.0.2.1",
		"The packet is from 192.0.2.1, this node itself: --from asks about another.")
}

package main

import (
	"encoding/json"
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

// A limit on a set of ours, or on its elements, decides for each packet.
func TestExplainDoesNotTrustALimitedSet(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	nfttest.Require(t, "nft")
	n := newTrafficNode(t)
	n.enforce("")
	for _, statement := range []string{"quota 1 bytes", "limit rate 1/hour burst 1 packets"} {
		table := nfttest.NFT(t, n.top.Node, "", "list", "table", "inet", nft.TableName)
		limited := strings.Replace(table, "set non-masq-v4-a {\n", "set non-masq-v4-a {\n"+statement+"\n", 1)
		nfttest.NFT(t, n.top.Node, "delete table inet "+nft.TableName+"\n"+limited, "-f", "-")
		x, text := n.explained("10.9.0.9", "--from", n.top.PodV4.String(), "--config", n.path)
		if x.Why.Code != "unknown" || !strings.Contains(text, "Another program changed this agent's rules") {
			t.Errorf("%s: %+v: %s", statement, x.Why, text)
		}
		n.judge(x, n.seen(netip.MustParseAddr("10.9.0.9"), 5000))
		nfttest.NFT(t, n.top.Node, "delete table inet "+nft.TableName+"\n"+table, "-f", "-")
	}
}

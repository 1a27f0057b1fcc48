package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/nft"
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
		if len(x.Answers) != 1 || x.Answers[0].Verdict != want || x.Answers[0].Source != "any pod" {
			t.Errorf("%s: %+v, want %s", dst, x.Answers, want)
		}
	}
}

func TestExplainNotesSurprises(t *testing.T) {
	const (
		many     = "Multicast and broadcast are masqueraded too, as with the older agents."
		ownToo   = "The node's own traffic is masqueraded like a pod's."
		fromNode = "The source is this node; its own traffic is masqueraded too."
		elsewise = "Not by this agent, that is: another rule on the node may still masquerade it."
		lasting  = "This applies to new connections; existing connections keep their address."
	)
	tests := []struct {
		args []string
		want []string
	}{
		{[]string{"203.0.113.9"}, []string{ownToo, lasting}},
		{[]string{"203.0.113.9", "--from", "10.1.2.3"}, []string{lasting}},
		{[]string{"203.0.113.9", "--from", "192.0.2.1"}, []string{fromNode, lasting}},
		{[]string{"224.0.0.251"}, []string{many, ownToo, lasting}},
		{[]string{"255.255.255.255", "--from", "10.1.2.3"}, []string{many, lasting}},
		{[]string{"192.0.2.255", "--from", "10.1.2.3"}, []string{many, lasting}},
		{[]string{"192.0.2.254", "--from", "10.1.2.3"}, []string{lasting}},
		{[]string{"ff02::fb", "--enable-ipv6", "--from", "fd00::1"}, []string{many, lasting}},
		{[]string{"10.1.2.3"}, []string{elsewise, lasting}},
		{[]string{"127.0.0.1"}, []string{lasting}},
	}
	for _, tt := range tests {
		if got := explainJSON(t, tt.args...).Notes[1:]; !slices.Equal(got, tt.want) {
			t.Errorf("%v: %q, want %q", tt.args, got, tt.want)
		}
	}
}

func TestExplainUsesFlagsAndFileOfARunningAgent(t *testing.T) {
	// Process 100 is this one; the other one sees other files.
	proc := t.TempDir()
	for link, to := range map[string]string{"self": "100", "100/ns/mnt": "mnt:[1]", "9/ns/mnt": "mnt:[2]", "100/ns/net": "net:[1]", "9/ns/net": "net:[1]", "9/exe": "/nft-masq-agent"} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(proc, link)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(to, filepath.Join(proc, link)); err != nil {
			t.Fatal(err)
		}
	}
	conf := filepath.Join(proc, "9/root/conf")
	if err := os.MkdirAll(filepath.Dir(conf), 0o755); err != nil {
		t.Fatal(err)
	}
	for file, text := range map[string]string{
		filepath.Join(proc, "9/cmdline"): "nft-masq-agent\x00--config\x00/conf\x00--enable-ipv6\x00",
		conf:                             "nonMasqueradeCIDRs: ['2001:db8::/32']\n",
	} {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for args, want := range map[string][]string{
		"explain 2001:db8::2":                {"not masqueraded", "     /conf:1:22\n", "with the flags of the running agent (pid 9: --config /conf --enable-ipv6)"},
		"explain 2001:db8::2 --masq-chain X": {"IPv6 is disabled (set enableIPv6)"},
	} {
		var out strings.Builder
		e := testEnvironment(t, &out, &out)
		e.proc = proc
		if code := dispatch(t.Context(), commands(), strings.Fields(args), e); code != exitDone {
			t.Fatalf("%s: exit code %d: %s", args, code, out.String())
		}
		text := strings.Join(strings.Fields(out.String()), " ")
		for _, w := range want {
			if !strings.Contains(text, strings.TrimSpace(w)) {
				t.Errorf("%s: %q is not in:\n%s", args, w, out.String())
			}
		}
	}
	if err := os.WriteFile(conf, []byte("masqLinkLocal: 5\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	var stderr strings.Builder
	e := testEnvironment(t, &stderr, &stderr)
	e.proc = proc
	if code := dispatch(t.Context(), commands(), []string{"explain", "2001:db8::1"}, e); code != exitFailed || !strings.Contains(stderr.String(), "enable-ipv6)\n/conf:1:16: ") {
		t.Errorf("a bad file: exit code %d: %s", code, stderr.String())
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
		{"--from 10.244.1.5 --out bond0", nft.Exempt, ""},
		{"--from 203.0.113.7", nft.Exempt, ""},
		{"--from 192.0.2.1", nft.Exempt, ""},
	} {
		x := explainJSON(t, append([]string{"198.51.100.7", "--config", path}, strings.Fields(tt.args)...)...)
		a := x.Answers[0]
		if place := a.Steps[len(a.Steps)-1].Place; a.Verdict != tt.want || place != tt.by {
			t.Errorf("%s: %s by %q, want %s by %q", tt.args, a.Verdict, place, tt.want, tt.by)
		}
	}
}

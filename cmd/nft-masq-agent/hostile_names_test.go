package main

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/netns"
)

// evil is a name with terminal control characters, with characters that hide or
// reverse text, with a byte that is not UTF-8, and with a forged line.
const evil = "\x1b[2J\x07\u009b1m\u202e\u200b\u2066\ufeff\U000e0041\xff\"\nin sync: all is well\\"

// evilProgram is a process name with the same, as far as it fits.
const evilProgram = "\x1b[2J\u009b\nis fine"

// spoil creates a masquerading base chain with evil names, and evil objects in
// our table, as a process with an evil name.
func spoil(n *testNode) {
	n.t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	const comm = "/proc/thread-self/comm"
	before, err := os.ReadFile(comm)
	n.check(err)
	n.check(os.WriteFile(comm, []byte(evilProgram), 0))
	defer func() { n.check(os.WriteFile(comm, before, 0)) }()
	b := &nfnetlink.Batch{}
	const evilTable = evil + "table"
	b.AddTable(nfnetlink.IPv4, evilTable)
	b.AddSet(nfnetlink.Set{Family: nfnetlink.IPv4, Table: evilTable, Name: evil + "set", KeyType: 7, KeyLen: 4})
	b.AddChain(nfnetlink.Chain{Family: nfnetlink.IPv4, Table: evilTable, Name: evil + "chain"})
	b.AddChain(nfnetlink.Chain{
		Family: nfnetlink.IPv4, Table: evilTable, Name: evil + "base", Policy: nfnetlink.Accept,
		Hook: &nfnetlink.Hook{Type: "nat", Number: unix.NF_INET_POST_ROUTING, Priority: 100},
	})
	comment := append([]byte{0, byte(len(evil) + 1)}, evil+"\x00"...)
	source := []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 4},
		&expr.Lookup{SourceRegister: 1, SetName: evil + "set"},
	}
	rule := func(chain string, exprs ...expr.Any) {
		b.AddRule(nfnetlink.Rule{
			Family: nfnetlink.IPv4, Table: evilTable, Chain: chain,
			Exprs: nfnetlink.Marshal(nfnetlink.IPv4, exprs...), UserData: comment,
		})
	}
	rule(evil+"chain", append(source, &expr.Masq{})...)
	rule(evil+"base", &expr.Verdict{Kind: expr.VerdictJump, Chain: evil + "chain"})
	b.AddSet(nfnetlink.Set{Family: nfnetlink.Inet, Table: nft.TableName, Name: evil, KeyType: 7, KeyLen: 4})
	b.AddChain(nfnetlink.Chain{Family: nfnetlink.Inet, Table: nft.TableName, Name: evil})
	b.AddCounter(nfnetlink.Inet, nft.TableName, evil)
	b.AddRule(nfnetlink.Rule{
		Family: nfnetlink.Inet, Table: nft.TableName, Chain: native.BaseChain, UserData: comment,
		Exprs: nfnetlink.Marshal(nfnetlink.Inet, &expr.Verdict{Kind: expr.VerdictJump, Chain: evil}),
	})
	c := n.connect()
	defer c.Close()
	n.check(c.Commit(b))
}

// obeyed returns the first control characters of a text.
func obeyed(text string) string {
	control := func(r rune) bool { return r != '\n' && (!unicode.IsPrint(r) || r == utf8.RuneError) }
	if i := strings.IndexFunc(text, control); i >= 0 {
		return text[max(0, i-40):min(len(text), i+40)]
	}
	return ""
}

func TestForeignNamesAreNotPrintedRaw(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	n := newNode(t)
	n.check(os.Mkdir(n.path, 0o755))
	n.check(os.WriteFile(filepath.Join(n.path, evil+".yaml"), []byte("nonMasqueradeCIDRs: 1"), 0o644))
	socket := n.socket
	d := n.start("--http-address", httpAddress, "--probe-socket", socket)
	d.began(wants(t, ""))
	spoil(n)
	text := func() string { return d.Text() }
	if line := d.await("rules_restored"); !strings.Contains(line.Texts("what"), `\033[2J`) {
		t.Errorf("the evil names are not logged: %v", line)
	}
	answers := map[string]string{}
	for _, path := range []string{"/healthz", "/readyz", "/metrics"} {
		_, answers[path] = n.get(path)
	}
	answers["ready"] = n.run("ready", "--probe-socket", socket).stdout
	for what, text := range answers {
		if obeyed(text) != "" || strings.Contains(text, "\nin sync: all") {
			t.Errorf("%s has %q in\n%s", what, obeyed(text), text)
		}
	}
	for _, what := range []string{"/readyz", "ready"} {
		if !strings.Contains(answers[what], `\x1b[2J`) {
			t.Errorf("%s does not name the file: %s", what, answers[what])
		}
	}
	d.stop()
	if obeyed(text()) != "" || strings.Contains(text(), "\nin sync: all") {
		t.Errorf("log: %q in\n%s", obeyed(text()), text())
	}
	spoil(n)
	for _, args := range []string{
		"status", "status -o json", "explain 10.1.2.3", "explain 10.1.2.3 -o json",
		"cleanup --legacy",
	} {
		got := n.run(strings.Fields(args)...)
		if text := got.stdout + got.stderr; obeyed(text) != "" || strings.Contains(text, "\nin sync: all is well") {
			t.Errorf("%s prints %q in\n%s", args, obeyed(text), text)
		}
	}
}

// Device names have no slash and no white space.
func TestNoNameOfADeviceOrArgumentIsPrintedRaw(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	const device = "\x1b[2J\u202e\"\\"
	n := newNode(t)
	n.check(netns.AddVeth(netns.End{NS: n.NS, Dev: device, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 1}},
		netns.End{NS: n.NS, Dev: "far", MAC: net.HardwareAddr{2, 0, 0, 0, 0, 2}}))
	n.check(n.LinkUp(device))
	n.check(n.LinkUp("far"))
	n.check(n.AddAddr(device, netip.MustParsePrefix("203.0.113.1/24")))
	n.check(n.AddRoute(netns.Route{
		Dst: netip.MustParsePrefix("0.0.0.0/0"), Via: netip.MustParseAddr("203.0.113.9"),
		Dev: device,
	}))
	asked := [][]string{ // whatever the config is
		{device},
		{"run", device},
		{"check", "--" + device},
		{"check", "--mode=" + device},
		{"check", "--config", device},
		{"explain", device},
		{"ready", "--probe-socket", device},
		{"check", "--masq-chain=" + device},
		{"diff", device, device},
		{"help", device},
	}
	for _, config := range []string{
		"", "masqueradeOutInterfaces: [eth0]\n",
		"nonMasqueradeOutInterfaces: ['\u202a*', '?*', \"\\e*\"]\n", "masqueradeSrcInterfaces: [\"\\e*\"]\n",
	} {
		n.write(config)
		d := n.start()
		d.await("starting")
		answers := map[string]result{}
		for _, args := range append(asked, [][]string{
			{"check", "--config", n.path},
			{"check", "--config", n.path, "-o", "json"},
			{"explain", "8.8.8.8"},
			{"explain", "203.0.113.1"},
			{"explain", "8.8.8.8", "--out", device},
			{"explain", "8.8.8.8", "-o", "json"},
			{"explain", "8.8.8.8", "--trace=1ms"},
			{"status"},
			{"diff", "--config", n.path},
			{"connections"},
		}...) {
			answers[strings.Join(args, " ")] = n.run(args...)
		}
		d.stop()
		answers["log"] = result{stdout: d.Text()}
		for what, got := range answers {
			if text := got.stdout + got.stderr; obeyed(text) != "" {
				t.Errorf("%q prints %q", what, obeyed(text))
			}
		}
		asked = nil
	}
}

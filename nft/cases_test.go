package nft

import (
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/config"
	"nft-masq-agent/nft/nfttest"
)

var update = flag.Bool("update", false, "renew the golden files in testdata/cases")

const casesDir = "../testdata/cases"

var modes = []Mode{ModeNFTables, ModeIPTables}

// A testCase is a directory of testdata/cases.
type testCase struct {
	name    string
	dir     string
	config  config.Config
	flags   func(Mode) Options
	packets []packet
}

// A packet is a line of packets.txt: the first packet of a connection and what
// becomes of it.
type packet struct {
	line     string
	src, dst netip.Addr
	proto    nfttest.Proto
	verdict  Verdict
}

// eachCase runs a test for every case.
func eachCase(t *testing.T, test func(*testing.T, testCase)) {
	t.Helper()
	entries, err := os.ReadDir(casesDir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		t.Run(e.Name(), func(t *testing.T) { test(t, loadCase(t, e.Name())) })
	}
}

func loadCase(t testing.TB, name string) testCase {
	t.Helper()
	c := testCase{name: name, dir: filepath.Join(casesDir, name)}
	var defaults config.Defaults
	defaults, c.flags = parseFlags(t, strings.Fields(c.file(t, "flags")))
	var err error
	source := config.Source{Name: "config.yaml", Data: []byte(c.file(t, "config.yaml"))}
	if c.config, _, err = config.Parse(defaults, source); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(c.file(t, "packets.txt")) {
		if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
			c.packets = append(c.packets, parsePacket(t, line))
		}
	}
	return c
}

func (c testCase) file(t testing.TB, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(c.dir, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func (c testCase) compile(m Mode) Ruleset { return Compile(c.config, c.flags(m)) }

// parseFlags reads the policy flags of the command line. Random source ports
// are on in mode nftables and off in mode iptables-nft, unless given.
func parseFlags(t testing.TB, args []string) (config.Defaults, func(Mode) Options) {
	t.Helper()
	var d config.Defaults
	fs := flag.NewFlagSet("flags", flag.ContinueOnError)
	fs.BoolVar(&d.AllReservedRanges, "nomasq-all-reserved-ranges", false, "")
	fs.BoolVar(&d.EnableIPv6, "enable-ipv6", false, "")
	chain := fs.String("masq-chain", "IP-MASQ-AGENT", "")
	ports := fs.String("to-ports", "", "")
	randomFully := fs.Bool("random-fully", true, "")
	if err := fs.Parse(args); err != nil {
		t.Fatal(err)
	}
	given := false
	fs.Visit(func(f *flag.Flag) { given = given || f.Name == "random-fully" })
	ranges, err := ParsePorts(*ports)
	if err != nil {
		t.Fatal(err)
	}
	return d, func(m Mode) Options {
		random := *randomFully && (m == ModeNFTables || given)
		return Options{Mode: m, Chain: *chain, RandomFully: random, Ports: ranges}
	}
}

func parsePacket(t testing.TB, line string) packet {
	t.Helper()
	words := strings.Fields(line)
	p := packet{line: line, proto: nfttest.UDP}
	switch {
	case len(words) == 5 && words[3] == "->":
		p.proto = nfttest.Proto(words[2])
	case len(words) != 4 || words[2] != "->":
		t.Fatalf("packet %q: want SOURCE DESTINATION [PROTO] -> VERDICT", line)
	}
	p.verdict = Verdict(words[len(words)-1])
	var err error
	if p.src, err = netip.ParseAddr(words[0]); err != nil {
		t.Fatal(err)
	}
	if p.dst, err = netip.ParseAddr(words[1]); err != nil {
		t.Fatal(err)
	}
	return p
}

func TestRulesetsPrintAsTheGoldenFiles(t *testing.T) {
	golden := map[Mode]string{ModeNFTables: "ruleset.nft", ModeIPTables: "iptables.rules"}
	eachCase(t, func(t *testing.T, c testCase) {
		for _, m := range modes {
			got := c.compile(m).String()
			if *update {
				if err := os.WriteFile(filepath.Join(c.dir, golden[m]), []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if diff := cmp.Diff(c.file(t, golden[m]), got); diff != "" {
				t.Errorf("%s (-want +got):\n%s", golden[m], diff)
			}
		}
	})
}

func TestPolicyDecidesAsThePacketsSay(t *testing.T) {
	eachCase(t, func(t *testing.T, c testCase) {
		for _, m := range modes {
			for _, p := range c.packets {
				if got := c.compile(m).Policy.Decide(p.src, p.dst, p.verdict == Local); got != p.verdict {
					t.Errorf("mode %s: %s: got %s", m, p.line, got)
				}
			}
		}
	})
}

package cases

import (
	"cmp"
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/xtables"
)

// DefaultChain is the chain of mode iptables-nft unless the flags set another.
const DefaultChain = "IP-MASQ-AGENT"

// Modes returns both modes.
func Modes() []nft.Mode { return []nft.Mode{nft.ModeNFTables, nft.ModeIPTables} }

// CIDRs returns prefixes as a list of a config.
func CIDRs(prefixes ...string) []config.CIDR {
	out := make([]config.CIDR, len(prefixes))
	for i, p := range prefixes {
		out[i].Prefix = netip.MustParsePrefix(p)
	}
	return out
}

// Addrs returns addresses.
func Addrs(texts ...string) []netip.Addr {
	out := make([]netip.Addr, len(texts))
	for i, text := range texts {
		out[i] = netip.MustParseAddr(text)
	}
	return out
}

// A Case is a directory of testdata/cases.
type Case struct {
	Name    string
	Dir     string
	Config  config.Config
	Flags   func(nft.Mode) nft.Options
	Packets []Packet
	// Addresses are those of the node that snatAddresses can mean.
	Addresses []netip.Addr

	defaults config.Defaults
	source   config.Source
}

// A Packet is a line of packets.txt: the first packet of a connection and the
// expected verdict.
type Packet struct {
	Line     string
	Src, Dst netip.Addr
	Proto    nfttest.Proto
	Verdict  nft.Verdict
	// Seen has the possible sources of a masqueraded connection; none: the address of
	// the interface.
	Seen []netip.Addr
}

// nodeAddresses are the node's addresses in an nfttest.Topology.
func nodeAddresses() []string {
	return []string{"192.0.2.1", "2001:db8::1", "10.244.1.1", "fd00:10:244:1::1"}
}

// Connection returns the packet as a connection that a policy decides about.
func (p Packet) Connection() nft.Connection {
	return nft.Connection{
		Src: p.Src, Dst: p.Dst, ToNode: p.Verdict == nft.Local, InInterface: "pod0", OutInterface: "eth0",
		FromNode: p.Src.IsLoopback() || slices.Contains(nodeAddresses(), p.Src.String()),
	}
}

// Modes returns the modes that can express the case.
func (c Case) Modes() []nft.Mode {
	return slices.DeleteFunc(Modes(), func(m nft.Mode) bool {
		return nft.Build(c.defaults, c.Flags(m), c.source).Problems.Err() != nil
	})
}

// EachIn runs a test for every case that a mode can express.
func EachIn(t *testing.T, m nft.Mode, test func(*testing.T, Case)) {
	t.Helper()
	for _, c := range all(t) {
		if slices.Contains(c.Modes(), m) {
			t.Run(c.Name, func(t *testing.T) { test(t, c) })
		}
	}
}

// SkipIfShort skips a test that takes long for all cases: with -short it is done for
// those that differ most from each other.
func (c Case) SkipIfShort(t *testing.T) {
	t.Helper()
	few := []string{
		"all-policies", "default", "drop-invalid", "enforce", "everything", "interfaces", "snat-rules",
		"snat-several", "to-ports-force", "to-ports-several",
	}
	if testing.Short() && !slices.Contains(few, c.Name) {
		t.Skip("-short")
	}
}

// Each runs a test for every case.
func Each(t *testing.T, test func(*testing.T, Case)) {
	t.Helper()
	for _, c := range all(t) {
		t.Run(c.Name, func(t *testing.T) { test(t, c) })
	}
}

func all(t *testing.T) (loaded []Case) {
	t.Helper()
	entries, err := os.ReadDir(dir(t))
	nfttest.NoError(t, err)
	for _, e := range entries {
		loaded = append(loaded, Load(t, e.Name()))
	}
	return loaded
}

// dir finds testdata/cases above the directory of the test.
func dir(t testing.TB) string {
	t.Helper()
	for at := ".."; ; at = filepath.Join("..", at) {
		cases := filepath.Join(at, "testdata", "cases")
		if _, err := os.Stat(cases); err == nil {
			return cases
		}
		if abs, err := filepath.Abs(at); err != nil || abs == "/" {
			t.Fatal("no testdata/cases above this directory")
		}
	}
}

// Load reads a case by its name.
func Load(t testing.TB, name string) Case {
	t.Helper()
	c := Case{Name: name, Dir: filepath.Join(dir(t), name)}
	c.defaults, c.Flags = parseFlags(t, strings.Fields(c.File(t, "flags")))
	c.source = config.Source{Name: "config.yaml", Data: []byte(c.File(t, "config.yaml"))}
	var problems config.Problems
	if c.Config, problems = config.Parse(c.defaults, c.source); problems.Err() != nil {
		t.Fatal(problems)
	}
	if text, err := os.ReadFile(filepath.Join(c.Dir, "addresses")); err == nil {
		c.Addresses = Addrs(strings.Fields(string(text))...)
	}
	for line := range strings.Lines(c.File(t, "packets.txt")) {
		if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
			p := parsePacket(t, line)
			if p.Verdict == nft.Masqueraded && len(p.Seen) == 0 {
				p.Seen = SpecifiedSources(c.Config, p.Connection(), c.Addresses)
			}
			c.Packets = append(c.Packets, p)
		}
	}
	return c
}

// File returns the content of one of the case's files.
func (c Case) File(t testing.TB, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(c.Dir, name))
	nfttest.NoError(t, err)
	return string(b)
}

// Compile compiles the case for a mode.
func (c Case) Compile(m nft.Mode) nft.Ruleset {
	return nft.Compile(c.Config, c.Flags(m)).WithAddresses(c.Addresses)
}

// parseFlags reads the policy flags of the command line. Random source ports
// are on in mode nftables and off in mode iptables-nft, unless given.
func parseFlags(t testing.TB, args []string) (config.Defaults, func(nft.Mode) nft.Options) {
	t.Helper()
	var d config.Defaults
	fs := flag.NewFlagSet("flags", flag.ContinueOnError)
	fs.BoolVar(&d.AllReservedRanges, "nomasq-all-reserved-ranges", false, "")
	fs.BoolVar(&d.EnableIPv6, "enable-ipv6", false, "")
	chain := fs.String("masq-chain", DefaultChain, "")
	ports := fs.String("to-ports", "", "")
	randomFully := fs.Bool("random-fully", true, "")
	nfttest.NoError(t, fs.Parse(args))
	given := false
	fs.Visit(func(f *flag.Flag) { given = given || f.Name == "random-fully" })
	ranges, err := config.ParsePorts(*ports)
	nfttest.NoError(t, err)
	return d, func(m nft.Mode) nft.Options {
		random := *randomFully && (m == nft.ModeNFTables || given)
		return nft.Options{Layout: Layout(m, *chain), RandomFully: random, Ports: ranges, Marks: Marks()}
	}
}

var packetForm = regexp.MustCompile(`^(\S+)\s+(\S+)(?:\s+(\S+))?\s+->\s+(\S+)(?:\s+(\S+))?$`)

// parsePacket reads a line of packets.txt.
func parsePacket(t testing.TB, line string) Packet {
	t.Helper()
	m := packetForm.FindStringSubmatch(line)
	if m == nil {
		t.Fatalf("packet %q: want SOURCE DESTINATION [PROTO] -> VERDICT [SEEN-AS]", line)
	}
	return Packet{
		Line: line, Src: netip.MustParseAddr(m[1]), Dst: netip.MustParseAddr(m[2]),
		Proto: nfttest.Proto(cmp.Or(m[3], string(nfttest.UDP))), Verdict: nft.Verdict(m[4]),
		Seen: Addrs(strings.Fields(m[5])...),
	}
}

// Marks returns the default of --masquerade-marks: those of kube-proxy and of the CNI
// plugin portmap.
func Marks() []nft.Mark {
	return []nft.Mark{{Value: 0x4000, Mask: 0x4000}, {Value: 0x2000, Mask: 0x2000}}
}

// Layout returns the layout of a mode. The chain is used by those that have one.
func Layout(m nft.Mode, chain string) nft.Layout {
	if m == nft.ModeIPTables {
		return xtables.Layout{ChainName: chain}
	}
	return native.Layout{}
}

package cases

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layouts"
)

// decided is what a policy decides, without positions and covered entries.
type decided struct {
	IPv6       bool
	Key        string
	CIDRs      []netip.Prefix
	Interfaces []string
}

func decisions(p nft.Policy) (out []decided) {
	for _, f := range p.Families {
		out = append(out, decided{IPv6: f.IPv6, CIDRs: f.SNAT.Prefixes(), Interfaces: strings.Fields(fmt.Sprint(f.SNAT.Present))})
		for _, q := range f.Questions {
			d := decided{IPv6: f.IPv6, Key: q.Key, CIDRs: q.Prefixes()}
			for _, i := range q.Interfaces {
				d.Interfaces = append(d.Interfaces, i.Name)
			}
			out = append(out, d)
		}
	}
	return out
}

// checkLaw verifies that decompile(compile(p)) is p, and compiles to the same.
func checkLaw(t *testing.T, c config.Config, o nft.Options, node []netip.Addr, decompile func(*testing.T, nft.Ruleset) nft.Policy) {
	t.Helper()
	r := nft.Compile(c, o).On(node)
	back := decompile(t, r)
	if diff := cmp.Diff(decisions(r.Policy), decisions(back), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
		t.Fatalf("mode %s (-compiled +read back):\n%s", o.Layout.Mode(), diff)
	}
	if back.RandomFully != r.Policy.RandomFully || !slices.Equal(back.Ports, r.Policy.Ports) {
		t.Fatalf("mode %s: random-fully %t, ports %v, want %t, %v", o.Layout.Mode(), back.RandomFully, back.Ports, r.Policy.RandomFully, r.Policy.Ports)
	}
	if marks := func(p nft.Policy) string {
		if p.Enforce == nil {
			return "none"
		}
		return fmt.Sprint(p.Enforce.Marks)
	}; marks(back) != marks(r.Policy) {
		t.Fatalf("mode %s: enforced except for %s, want %s", o.Layout.Mode(), marks(back), marks(r.Policy))
	}
	if again := nft.CompilePolicy(back, o.Layout); !again.Same(r) || again.String() != r.String() {
		t.Fatalf("mode %s: compiled again:\n%s\nwant:\n%s", o.Layout.Mode(), again, r)
	}
}

// fileOf turns any bytes into a config file: the first ones select its keys, and
// each six more are a CIDR in one of the lists. The node has some of the addresses.
func fileOf(b []byte) (file string, node []netip.Addr) {
	head := append(b[:min(len(b), 2):min(len(b), 2)], 0, 0)
	lists := map[string][]string{}
	var keys []string
	for _, row := range config.Conditions() {
		if row.Set != "" {
			keys = append(keys, row.Key)
		}
	}
	keys = append(keys, config.KeySNATAddresses)
	for b = b[min(len(b), 2):]; len(b) >= 6; b = b[6:] {
		a := netip.AddrFrom4([4]byte(b[1:5]))
		if b[0]&1 != 0 { // an IPv6 address of which four bytes vary
			a = netip.AddrFrom16([16]byte{0: b[1] | 0x20, 1: b[2], 7: b[3], 15: b[4]})
		}
		p := netip.PrefixFrom(a, int(b[5])%(a.BitLen()+1)).Masked()
		if a.Is6() && p.Bits() > 0 && p.Overlaps(netip.MustParsePrefix("::ffff:0:0/96")) {
			continue // IPv4-mapped ones are invalid in a config
		}
		key := keys[int(b[0]>>1)%len(keys)]
		lists[key] = append(lists[key], fmt.Sprintf("%q", p))
		if b[5] < 128 {
			node = append(node, a)
		}
	}
	var text strings.Builder
	for i, key := range []string{"enableIPv6", "masqLinkLocal", "masqLinkLocalIPv6", "masqueradeHost"} {
		fmt.Fprintf(&text, "%s: %t\n", key, head[0]>>i&1 != 0)
	}
	for _, key := range keys {
		fmt.Fprintf(&text, "%s: [%s]\n", key, strings.Join(lists[key], ", "))
	}
	return text.String(), node
}

// CheckLaw verifies for random policies that decompiling the compiled policy
// returns the policy.
func CheckLaw(t *testing.T, mode nft.Mode, decompile func(*testing.T, nft.Ruleset) nft.Policy) {
	t.Helper()
	m := NewMaker(31)
	for range 500 {
		checkLaw(t, m.Config(), m.Options(mode), m.Addresses(), decompile)
	}
}

// FuzzLaw is CheckLaw for policies from the fuzzer.
func FuzzLaw(f *testing.F, mode nft.Mode, decompile func(*testing.T, nft.Ruleset) nft.Policy) {
	f.Helper()
	f.Add([]byte{0, 0, 6, 10, 0, 0, 0, 8})
	f.Add([]byte{7, 3, 0, 10, 0, 0, 0, 8, 3, 0xfd, 0, 0, 1, 64, 4, 10, 9, 0, 0, 16, 7, 0xfd, 0, 0, 1, 128, 4, 0, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		text, node := fileOf(b)
		c, problems := config.Parse(config.Defaults{}, config.Source{Name: "f", Data: []byte(text)})
		if err := problems.Err(); err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
		o := nft.Options{Layout: layouts.Of(mode, DefaultChain)}
		if len(b) > 1 {
			o.RandomFully = b[1]&1 != 0
			for i := range b[1] >> 1 & 3 {
				from := 1024 + uint16(i)*10000
				o.Ports = append(o.Ports, nft.PortRange{Min: from, Max: from + uint16(b[0])})
			}
		}
		checkLaw(t, c, o, node, decompile)
	})
}

package trace_test

import (
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/trace"
)

var update = flag.Bool("update", false, "rewrite testdata/packets.txt")

// packets are those that rows begin with: what they have else than packet returns.
var packets = map[string]func(p *trace.Packet){
	"ipv6": func(p *trace.Packet) {
		p.Src, p.Dst = netip.MustParseAddr("fd00::2"), netip.MustParseAddr("2001:db8::9")
	},
	"itself":     func(p *trace.Packet) { p.Dst = p.Src },
	"node":       func(p *trace.Packet) { p.FromNode, p.In = true, routes.Interface{} },
	"delivered":  func(p *trace.Packet) { p.DstType = unix.RTN_LOCAL },
	"bridged":    func(p *trace.Packet) { p.Bridged, p.Out = true, p.In },
	"stranger":   func(p *trace.Packet) { p.SrcType, p.In = unix.RTN_UNSPEC, routes.Interface{} },
	"received":   func(p *trace.Packet) { p.SrcType = unix.RTN_UNSPEC },
	"translated": func(p *trace.Packet) { p.Translated = trace.Yes },
	"perhaps":    func(p *trace.Packet) { p.Translated = trace.Maybe },
	"known":      func(p *trace.Packet) { p.Known = true },
	"tcp":        func(p *trace.Packet) { p.Protocol, p.Port = unix.IPPROTO_TCP, 80 },
	"prefix":     func(p *trace.Packet) { p.In.Name = "cali*" },
	"unknown":    func(p *trace.Packet) { *p = trace.Packet{Src: p.Src, Dst: p.Dst} },
}

// packet is received on cali0 and leaves by eth0.
func packet() trace.Packet {
	return trace.Packet{
		Src: netip.MustParseAddr("10.244.1.2"), Dst: netip.MustParseAddr("203.0.113.9"), SrcType: unix.RTN_UNICAST,
		DstType: unix.RTN_UNICAST, In: routes.Interface{Name: "cali0", Index: 5},
		Out: routes.Interface{Name: "eth0", Index: 2}, Unset: 0x20000, Masqueraded: netip.MustParseAddr("192.0.2.1"),
	}
}

// traced formats what decides which source the far end sees, "passes" if it may be the packet's own,
// the conditions, and what else rules do.
func traced(x trace.Result, atDestination bool) string {
	var words []string
	name := func(f trace.Finding) string {
		switch {
		case f.Ends():
			return "drop"
		case f.Code == trace.Masquerades:
			return "masquerade"
		case f.Keeps:
			return "keep"
		case len(f.To) == 0:
			return "somewhere"
		case len(f.To) > 1:
			return fmt.Sprint(f.To)
		}
		return f.To[0].String()
	}
	ways, itself := x.Seen()
	if atDestination {
		itself = x.Keeps != trace.No
		ways = slices.DeleteFunc(slices.Clone(x.Findings), func(f trace.Finding) bool {
			return !f.OfDestination || f.Code == trace.Rewrites
		})
	}
	for _, f := range ways {
		text := name(f)
		if f.Code == trace.Unknown {
			text = "anything"
		}
		if f.Direct {
			text = "direct " + text
		}
		if f.Code == trace.Rewrites {
			text = "write " + text
		}
		words = append(words, text)
	}
	if itself {
		words = append(words, "passes")
	}
	if len(x.Unknown) > 0 {
		words = append(words, "if "+strings.Join(x.Unknown, ", "))
	}
	for _, f := range x.Findings {
		switch {
		case f.Code == trace.Accepts && f.Sure:
			words = append(words, "left by "+f.RuleText())
		case f.Code == trace.Untracks && f.Sure:
			words = append(words, "untracked by "+f.RuleText())
		case f.Ends() && !f.OfSource() && f.Sure:
			words = append(words, "dropped by "+f.RuleText())
		case (f.Ends() || f.Code == trace.Unknown) && !f.OfSource():
			words = append(words, "may be dropped by "+f.RuleText())
		case f.Code == trace.Rewrites && f.OfDestination:
			words = append(words, map[bool]string{true: "all "}[f.Direct || f.Sure]+"redirected to "+name(f))
		}
	}
	return strings.Join(words, "; ")
}

// words describes a result: each finding with its new addresses, "?" if it may happen only, then
// whether the packet keeps its address.
func words(r trace.Result) string {
	var all []string
	for _, f := range r.Findings {
		w := string(f.Code)
		switch {
		case f.Keeps:
			w += " itself"
		case len(f.To) == 1:
			w += " " + f.To[0].String()
		case len(f.To) > 0:
			w += fmt.Sprint(f.To)
		}
		if !f.Sure {
			w += "?"
		}
		if f.Own {
			w = "our " + w
		}
		all = append(all, w)
	}
	truths := map[trace.Truth]string{trace.No: "no", trace.Maybe: "maybe", trace.Yes: "yes"}
	return strings.Join(append(all, "keeps "+truths[r.Keeps]), ", ")
}

// follow formats what rules do to a packet first, if anything, and what they do in all.
func follow(of *trace.Rules, p trace.Packet) (text string) {
	destination, source := trace.New(of).Trace(p)
	for i, r := range []trace.Result{destination, source} {
		line := traced(r, i == 0) + " | " + words(r)
		if m := r.Mark; m.Known|m.Open() != 0 {
			line += fmt.Sprintf(" | mark %#x of %#x, open %#x", m.Value, m.Known, m.Open())
		}
		if i == 1 || line != "passes | keeps yes" {
			text += "\t" + []string{"first: ", ""}[i] + line + "\n"
		}
	}
	return text
}

// Each section of testdata/packets.txt has a title, the program that loads rules, the rules, and rows. Rules have the
// parts of a row in place of $1, $2, $3; chains whose names begin with "ours" are this agent's. A row may begin with
// a packet. Below it is what happens to the packet, and once more if rules of this agent were not read.
func TestWhatRulesDoToAPacket(t *testing.T) {
	t.Parallel()
	file := filepath.Join("testdata", "packets.txt")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	sections := strings.Split(string(text), "\n# ")
	t.Run("section", func(t *testing.T) {
		for i, section := range sections {
			head, rows, _ := strings.Cut(section, "\n\n")
			title, script, _ := strings.Cut(head, "\n")
			parts := inParts(rows)
			for j, want := range parts {
				t.Run(title, func(t *testing.T) {
					t.Parallel()
					parts[j] = ""
					ns, c := dialNS(t)
					skipped := false
					for row := range strings.Lines(want) {
						if row[0] == '\t' {
							parts[j] += map[bool]string{true: row}[skipped]
							continue
						}
						newer := strings.Contains(row, "* :") || strings.Contains(row, "limit rate 5/second counter }")
						parts[j] += row
						if skipped = newer && nfttest.KernelBefore(t, 5, 13); !skipped { // maps have no *, elements one statement
							parts[j] += happens(t, ns, c, script, strings.TrimSuffix(row, "\n"))
						}
					}
					if diff := cmp.Diff(want, parts[j]); diff != "" && !*update {
						t.Errorf("(-want +got):\n%s", diff)
					}
				})
			}
			t.Cleanup(func() { sections[i] = head + "\n\n" + strings.Join(parts, "") })
		}
	})
	if *update && !t.Failed() {
		if err := os.WriteFile(file, []byte(strings.Join(sections, "\n# ")), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// inParts splits rows into parts of a hundred lines at least, which begin with a row.
func inParts(rows string) (parts []string) {
	lines := 0
	for line := range strings.Lines(rows) {
		if lines++; parts == nil || lines > 100 && line[0] != '\t' {
			parts, lines = append(parts, ""), 0
		}
		parts[len(parts)-1] += line
	}
	return parts
}

// happens returns what happens to the packet of a row.
func happens(t *testing.T, ns *nfttest.NS, c *nfnetlink.Conn, script, row string) (text string) {
	t.Helper()
	p := packet()
	if word, rest, _ := strings.Cut(row, ": "); packets[word] != nil {
		packets[word](&p)
		row = rest
	}
	program, rules, _ := strings.Cut(script, "\n")
	for i, part := range strings.Split(row, " || ") {
		rules = strings.ReplaceAll(rules, fmt.Sprintf("$%d", i+1), strings.ReplaceAll(part, "; ", "\n"))
	}
	call := strings.Fields(program)
	if flush := "flush ruleset\n"; call[0] == "nft" {
		rules = flush + rules
	} else {
		nfttest.NFT(t, ns, flush, "-f", "-")
	}
	nfttest.Run(t, ns, rules+"\n", call[0], call[1:]...)
	own := strings.Contains(rules, "chain ours")
	for _, of := range []trace.Scope{{Ours: true}, {}} {
		of.Own, of.Reads = func(c nfnetlink.Chain) bool { return strings.HasPrefix(c.Name, "ours") }, everything.Reads
		if of.Ours || own {
			text += follow(readAs(t, c, of), p)
		}
	}
	return text
}

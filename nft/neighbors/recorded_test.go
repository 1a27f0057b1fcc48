package neighbors

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

var update = flag.Bool("update", false, "rewrite the expect.txt files")

const recorded = "../../testdata/foreign"

// defaultExempt is what most configurations exempt.
const defaultExempt = "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 169.254.0.0/16 fd00::/8 fe80::/10"

// text returns a file of a case, empty if there is none.
func text(t *testing.T, name, file string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(recorded, name, file))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return string(b)
}

// exempting returns a policy without lists of sources.
func exempting(words string) nft.Ruleset {
	c := config.Config{
		EnableIPv6: true, MasqLinkLocal: true, MasqLinkLocalIPv6: true,
		NonMasqueradeCIDRs: cases.CIDRs(strings.Fields(words)...),
	}
	return nft.Compile(c, nft.Options{Layout: native.Layout{}})
}

// describe formats what was found, as in expect.txt.
func describe(s *State, o Others) string {
	var b strings.Builder
	for _, l := range o.Legacy {
		fmt.Fprintf(&b, "legacy %s %s %s: rules %d, jumps %d, random-fully %t\n", l.Family, l.Table, l.Name, l.Rules,
			l.Jumps(), l.RandomFully)
	}
	for _, c := range append(o.Conflicts, o.Overruled...) {
		fmt.Fprintf(&b, "%s %s %s (%s, priority %d)\n", c.Kind, c.Table(), c.Rule.Chain, c.Base.Name, c.Base.Hook.Priority)
		for _, v := range c.ViaText() {
			fmt.Fprintf(&b, "\tvia %s\n", v)
		}
		fmt.Fprintf(&b, "\trule %s\n\t%s\n", c.RuleText(), c.Why())
	}
	if b.Len() == 0 {
		return "nothing\n"
	}
	return b.String()
}

func TestRulesOfRealProgramsAreRecognized(t *testing.T) {
	t.Parallel()
	dirs, err := os.ReadDir(recorded)
	if err != nil || len(dirs) == 0 {
		t.Fatalf("no cases: %v", err)
	}
	for _, dir := range dirs {
		name := dir.Name()
		t.Run(name, func(t *testing.T) {
			ns := nfttest.NewNS(t, "node")
			nfttest.LoadForeign(t, ns, filepath.Join(recorded, name), nil)
			exempt := defaultExempt
			if words := text(t, name, "exempt.txt"); words != "" {
				exempt = words
			}
			s := survey(t, open(t, ns), exempting(exempt))
			o, err := s.Others()
			if err != nil || o.Unasked > 0 {
				t.Fatal(err, o.Unasked)
			}
			got := describe(s, o)
			if *update {
				must(t, os.WriteFile(filepath.Join(recorded, name, "expect.txt"), []byte(got), 0o644))
				return
			}
			if diff := cmp.Diff(text(t, name, "expect.txt"), got); diff != "" {
				t.Errorf("found (-want +got):\n%s", diff)
			}
		})
	}
}

func TestOurChainsAreNoConflicts(t *testing.T) {
	ns := nfttest.NewNS(t, "node")
	nfttest.LoadForeign(t, ns, filepath.Join(recorded, "ip-masq-agent-two-jumps"), nil)
	n, want := open(t, ns), cases.Load(t, "default").Compile(nft.ModeIPTables)
	o := others(t, n, want)
	if len(o.Conflicts) > 0 {
		t.Errorf("conflicts %v", o.Conflicts)
	}
}

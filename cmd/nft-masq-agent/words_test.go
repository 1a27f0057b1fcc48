package main

import (
	"flag"
	"strings"
	"testing"

	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
)

// A command's own flags come first; those of all commands are listed once.
func TestHelpListsSharedFlagsOnceUnderTheirOwnHeading(t *testing.T) {
	const heading = "\nFlags of all commands that read the config:\n"
	policy := flag.NewFlagSet("", flag.ContinueOnError)
	options.AddPolicyFlags(policy)
	for _, c := range commands() {
		fs, _ := c.flagSet()
		own, shared, found := strings.Cut(c.help(), heading)
		if found != (fs.Lookup("config") != nil) {
			t.Errorf("%s: heading: %t", c.name, found)
		}
		policy.VisitAll(func(f *flag.Flag) {
			in := func(text string) bool {
				return strings.Contains(strings.ReplaceAll(text, "\n  --"+f.Name+" ", "\n  --"+f.Name+"\n"), "\n  --"+f.Name+"\n")
			}
			if !options.IsKlogFlag(f.Name) && (in(own) || in("\n"+shared) != found) {
				t.Errorf("%s: --%s:\n%s", c.name, f.Name, c.help())
			}
		})
		if fs.Lookup("output") != nil && strings.Count(c.help(), "  -o, --output ") != 1 {
			t.Errorf("%s: --output:\n%s", c.name, c.help())
		}
	}
}

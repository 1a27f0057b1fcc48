package config

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"nft-masq-agent/nft/nfttest/script"
)

// A case has the text of a config, or of several, which "next" parts, and what it means, as changes prints it. With
// "(flags)" in the name all flags are set, and with "(manifest)" each is unwrapped.
func TestRowsMeanWhatTheySay(t *testing.T) {
	script.Golden(t, corpusFile("rows"), *update, func(t *testing.T, c *script.Case) {
		d := Defaults{EnableIPv6: true}
		if strings.Contains(c.Name, "(flags)") {
			d = Defaults{AllReservedRanges: true, EnableIPv6: true, ResyncInterval: time.Hour}
		}
		files := []string{c.Data}
		for _, s := range c.Steps {
			if s.Line != "next" {
				s.Unknown(t)
			}
			files = append(files, s.Data)
		}
		c.Last().Say(changes(d, files, strings.Contains(c.Name, "(manifest)")))
	})
}

// changes prints what files change of the defaults, which keys need mode nftables, and all problems.
func changes(d Defaults, files []string, manifests bool) string {
	var b strings.Builder
	var sources []Source
	for i, data := range files {
		s := Source{Name: fmt.Sprintf("f%d", i), Data: []byte(data)}
		if manifests {
			unwrapped, note, err := Unwrap(s)
			if err != nil {
				return lines(ProblemsOf(err))
			}
			if note != nil {
				b.WriteString(lines(Problems{*note}))
			}
			s = unwrapped
		}
		sources = append(sources, s)
	}
	was, _ := Parse(d)
	c, problems := Parse(d, sources...)
	for i := range reflect.TypeFor[Config]().NumField() {
		field := func(c Config) string { return fmt.Sprint(reflect.Indirect(reflect.ValueOf(c).Field(i))) }
		key := reflect.TypeFor[Config]().Field(i)
		if key.IsExported() && problems.Worst() != Error && field(was) != field(c) {
			b.WriteString(key.Name + ": " + field(c) + "\n")
		}
	}
	b.WriteString(lines(NeedsNFTables(c)) + lines(problems))
	return b.String()
}

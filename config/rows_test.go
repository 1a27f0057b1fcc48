package config

import (
	"fmt"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"nft-masq-agent/nft/nfttest"
)

// Each file of testdata/config/rows has paragraphs: a name, the text of a config, or of several
// ("=== next file"), and what it means, as changes prints it. With "(flags)" in the name all flags are set.
func TestRowsMeanWhatTheySay(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(corpus, "rows", "*.txt"))
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		nfttest.Golden(t, file, *update, func(_ *testing.T, name, text string) string {
			d := Defaults{EnableIPv6: true}
			if strings.Contains(name, "(flags)") {
				d = Defaults{AllReservedRanges: true, EnableIPv6: true, ResyncInterval: time.Hour}
			}
			return text + nfttest.Marked(changes(d, strings.Split(text, "=== next file\n")))
		})
	}
}

// changes prints what files change of the defaults, which keys need mode nftables, and all problems. A ConfigMap is
// unwrapped.
func changes(d Defaults, files []string) string {
	var b strings.Builder
	var sources []Source
	for i, data := range files {
		s, note, err := Unwrap(Source{Name: fmt.Sprintf("f%d", i), Data: []byte(data)})
		if err != nil {
			return fmt.Sprintf("error: %v\n", err)
		} else if note != nil {
			b.WriteString(lines(Problems{*note}))
		}
		sources = append(sources, s)
	}
	was, _ := Parse(d)
	c, problems := Parse(d, sources...)
	for i := range reflect.TypeFor[Config]().NumField() {
		field := func(c Config) string { return fmt.Sprint(reflect.Indirect(reflect.ValueOf(c).Field(i))) }
		if problems.Worst() != Error && field(was) != field(c) {
			b.WriteString(reflect.TypeFor[Config]().Field(i).Name + ": " + field(c) + "\n")
		}
	}
	b.WriteString(lines(NeedsNFTables(c)) + lines(problems))
	return b.String()
}

package config

import (
	"bytes"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"gopkg.in/yaml.v3"
)

// manyCIDRs returns n networks, each written by format.
func manyCIDRs(n int, format string) string {
	var b strings.Builder
	for i := range n {
		v := uint32(10)<<24 + uint32(i)<<8
		fmt.Fprintf(&b, format, netip.AddrFrom4([4]byte{byte(v >> 24), byte(v >> 16), byte(v >> 8)}), 24)
	}
	return b.String()
}

func BenchmarkParse100000(b *testing.B) {
	for name, file := range map[string]string{
		"plain":    "nonMasqueradeCIDRs:\n" + manyCIDRs(100_000, "  - %s/%d\n"),
		"quoted":   "nonMasqueradeCIDRs:\n" + manyCIDRs(100_000, "- \"%s/%d\"\n"),
		"comments": "nonMasqueradeCIDRs:\n" + manyCIDRs(100_000, "  - %s/%d # é\n"),
		"flow":     "nonMasqueradeCIDRs: [" + manyCIDRs(100_000, "%s/%d, ") + "]\n",
		"json":     `{"nonMasqueradeCIDRs": [` + manyCIDRs(100_000, "\"%s/%d\",\n") + `"10.0.0.0/8"]}`,
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, problems := Parse(Defaults{}, Source{Name: "f", Data: []byte(file)}); len(problems) > 0 {
					b.Fatal(problems)
				}
			}
		})
		b.Run(name+"/yaml.v3-alone", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				var n yaml.Node
				if err := yaml.NewDecoder(bytes.NewReader([]byte(file))).Decode(&n); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

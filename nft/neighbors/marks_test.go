package neighbors

import (
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/trace"
)

// A mark that rules of prerouting set can lead to masquerading later: of each packet the survey says
// what the trace of this packet does.
func TestMarksOfPreroutingLeadToConflicts(t *testing.T) {
	t.Parallel()
	const kubeProxy = "meta mark & 0x4000 == 0x4000 masquerade"
	for _, tt := range []struct{ early, late, want string }{
		{"meta mark set meta mark | 0x4000", kubeProxy, "is masqueraded"},
		{"ip saddr 10.244.1.0/24 meta mark set meta mark | 0x4000", kubeProxy, "is masqueraded"},
		{"ip daddr 203.0.113.9 meta mark set meta mark | 0x4000", kubeProxy, ""},
		{"meta l4proto udp meta mark set meta mark | 0x4000", kubeProxy, "is masqueraded where meta mark & 0x4000 == 0x4000"},
		{"meta mark set 7", "meta mark 7 masquerade", "is masqueraded"},
		{"meta mark set 7", "meta mark 8 masquerade", ""},
		{"", kubeProxy, ""},
	} {
		ns := nfttest.NewNS(t, "node")
		nfttest.NFT(t, ns, "table ip t { chain early { type filter hook prerouting priority mangle; "+tt.early+"; }; "+
			"chain late { type nat hook postrouting priority 90; "+tt.late+"; }; }", "-f", "-")
		s, err := open(t, ns).Survey(t.Context(), exempting(defaultExempt))
		if err != nil {
			t.Fatal(err)
		}
		o, err := s.Others()
		if err != nil {
			t.Fatal(err)
		}
		if len(o.Conflicts) == 0 && tt.want == "" {
			continue
		}
		if len(o.Conflicts) != 1 || tt.want == "" || !strings.HasSuffix(o.Conflicts[0].Why(), " "+tt.want) {
			t.Errorf("%s, %s: %v, want %q", tt.early, tt.late, o.Conflicts, tt.want)
			continue
		}
		c := o.Conflicts[0]
		tracer, err := s.Tracer(t.Context(), exempting(defaultExempt))
		if err != nil {
			t.Fatal(err)
		}
		by, _ := tracer.Trace(c.Src, c.Dst, routes.Routes{
			Ways: []routes.Route{{Type: unix.RTN_UNICAST}}, Back: routes.Route{Type: unix.RTN_UNICAST},
		})[0].Source.Seen()
		says := func(f trace.Finding) bool { return f.Rule.Handle == c.Rule.Handle && f.Sure == c.Sure }
		if !slices.ContainsFunc(by, says) {
			t.Errorf("%s, %s: %+v, traced was %+v", tt.early, tt.late, c, by)
		}
	}
}

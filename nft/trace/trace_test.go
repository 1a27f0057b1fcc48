package trace_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/trace"
)

// A set that is too large to read is asked for the address, and for the element that has all others.
func TestLargeSetsAreAsked(t *testing.T) {
	t.Parallel()
	ns, c := dialNS(t)
	var many strings.Builder
	for i := range 10_001 {
		fmt.Fprintf(&many, "10.9.%d.%d, ", i/250, i%250)
	}
	for _, tt := range []struct{ more, want string }{
		{"", "keeps yes"}, {"203.0.113.9", "foreign-masquerade, keeps no"}, {"*", "foreign-masquerade, keeps no"},
	} {
		if tt.more == "*" && nfttest.KernelBefore(t, 5, 13) {
			continue // it has no such element
		}
		nfttest.NFT(t, ns, `flush ruleset
			table ip t {
				set large { type ipv4_addr; elements = { `+many.String()+tt.more+` }; }
				chain post { type nat hook postrouting priority 100; ip daddr @large masquerade; }
			}`, "-f", "-")
		tracer := trace.New(read(t, c))
		tracer.Has = c.HasElement
		if got := words(tracer.At(packet(), unix.NF_INET_POST_ROUTING)); got != tt.want {
			t.Errorf("with %q: got %s, want %s", tt.more, got, tt.want)
		}
	}
}

// Expressions that need modules which few kernels have are known by name, and no other is.
func TestWhatAnExpressionDoesIsKnownByItsName(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]struct {
		code trace.Code
		is   trace.Truth
	}{
		"target REJECT": {trace.Rejects, trace.Yes}, "target TARPIT": {trace.Rejects, trace.Yes},
		"target DELUDE": {trace.Rejects, trace.Yes}, "reject": {trace.Rejects, trace.Yes},
		"target LOG": {"", trace.Yes}, "target TRACE": {"", trace.Yes}, "match comment": {"", trace.Yes},
		"counter": {"", trace.Yes}, "match statistic": {"", trace.Maybe}, "match LOG": {"", trace.Maybe},
		"dynset": {"", trace.Maybe}, "connlimit": {"", trace.Maybe}, "quota": {"", trace.Maybe}, "socket": {"", trace.Maybe},
		"tproxy": {trace.Unknown, trace.Maybe}, "synproxy": {trace.Unknown, trace.Maybe},
		"target TPROXY": {trace.Unknown, trace.Maybe}, "target NFQUEUE": {trace.Unknown, trace.Maybe},
		"target SYNPROXY": {trace.Unknown, trace.Maybe}, "target comment": {trace.Unknown, trace.Maybe},
		"target counter": {trace.Unknown, trace.Maybe}, "something new": {trace.Unknown, trace.Maybe},
		"target SNPT": {trace.Rewrites, trace.Yes}, "target DNPT": {trace.Rewrites, trace.Yes},
		"target HMARK": {"marks", trace.Yes}, "target NOTRACK": {trace.Untracks, trace.Yes},
		"target MASQUERADE": {trace.Masquerades, trace.Yes}, "target NETMAP": {trace.Translates, trace.Yes},
	} {
		kind, of, is := strings.Cut(name, " ")
		e := nfnetlink.Expr{Name: kind}
		if attr := map[string]uint16{"target": unix.NFTA_TARGET_NAME, "match": unix.NFTA_MATCH_NAME}[kind]; is {
			e.Attrs.AddBytes(attr, append([]byte(of), 0))
		}
		code, truth := trace.Effect(nfnetlink.Rule{Family: nfnetlink.IPv4, Exprs: []nfnetlink.Expr{e}})
		if code != want.code || truth != want.is {
			t.Errorf("%s: %q, %d, want %q, %d", name, code, truth, want.code, want.is)
		}
	}
}

// A packet that meets too many rules is not followed any further, and anything may happen to it.
func TestPacketsAreFollowedUpToABound(t *testing.T) {
	t.Parallel()
	ns, c := dialNS(t)
	nfttest.NFT(t, ns, "table ip t { chain post { type nat hook postrouting priority 100;\n"+
		strings.Repeat("meta l4proto tcp masquerade\n", 1001)+"}; }", "-f", "-")
	r := trace.New(read(t, c)).At(packet(), unix.NF_INET_POST_ROUTING)
	unknown := []string{"meta l4proto tcp", trace.TooMany}
	if len(r.Findings) != 1000 || !slices.Equal(r.Unknown, unknown) || r.Keeps != trace.Maybe {
		t.Errorf("%d findings, keeps %d: %q", len(r.Findings), r.Keeps, r.Unknown)
	}
}

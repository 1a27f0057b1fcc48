package kernel

import (
	"net/netip"
	"slices"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/node"
)

// Containers and virtual machines of the host keep the translation of their own program in
// each policy for pods, pods get what the policy says, no rule of such a program is a conflict,
// and the far end sees what a trace of the rules predicts.
func TestOtherProgramsKeepTranslatingTheirOwn(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft-restore")
	const pod, exempt, other = "10.244.1.2", "192.168.77.9", "203.0.113.9"
	policies := map[string]func(*config.Config){
		"pods":     func(*config.Config) {},
		"enforced": func(c *config.Config) { c.Enforce = &config.Position{} },
		"forced":   func(c *config.Config) { c.ForceMasqueradeCIDRs = cases.CIDRs("203.0.113.0/24") },
	}
	for _, tt := range []struct {
		sample, own string
		replace     []string // the bridge, by the interface of the topology
	}{
		{"docker-iptables", "172.17.0.9", []string{"docker0", "pod0"}},
		{"docker-nftables", "172.17.0.9", []string{"docker0", "pod0"}},
		{"docker-29", "172.17.0.9", []string{`"docker0"`, `"pod0"`}},
		{"docker-two-maps", "172.17.0.9", []string{`"docker0"`, `"pod0"`}},
		{"netavark", "10.88.0.9", []string{"podman0", "pod0"}},
		{"libvirt", "192.168.122.9", nil},
	} {
		t.Run(tt.sample, func(t *testing.T) {
			t.Parallel()
			w := newWire(t)
			loadSample(t, w.Node, tt.sample, tt.replace...)
			k := open(t, w.Node)
			for name, set := range policies {
				c := config.Config{
					NonMasqueradeCIDRs: cases.CIDRs("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),
					MasqueradeSrcCIDRs: cases.CIDRs("10.244.0.0/16"),
				}
				set(&c)
				want := nft.Compile(c, enforcingOptions())
				apply(t, k, want, everything)
				for _, flow := range []struct {
					src, dst string
					kept     bool
				}{{tt.own, exempt, false}, {tt.own, other, false}, {pod, exempt, true}, {pod, other, false}} {
					src, dst := netip.MustParseAddr(flow.src), netip.MustParseAddr(flow.dst)
					expected := w.NodeV4
					if flow.kept {
						expected = src
					}
					if seen := w.sees(t, flow.src, flow.dst, nfttest.UDP); seen != expected {
						t.Errorf("%s: %s is %s to %s, want %s", name, src, seen, dst, expected)
					}
					if told := predicted(t, w, k, want, src, dst); told != expected {
						t.Errorf("%s: %s to %s: the trace says %s, want %s", name, src, dst, told, expected)
					}
				}
				if o, err := k.Others(t.Context(), want); err != nil || len(o.Conflicts) > 0 || len(o.Overruled) > 0 {
					t.Errorf("%s: conflicts %v, %v, %v", name, o.Conflicts, o.Overruled, err)
				}
			}
		})
	}
}

// predicted returns the source address that a trace predicts, the zero address if it does not.
func predicted(t *testing.T, w *wire, k *Kernel, held nft.Ruleset, src, dst netip.Addr) (sees netip.Addr) {
	t.Helper()
	err := w.Node.Do(func() error {
		routes, err := node.Lookup(src, dst, "")
		if err != nil {
			return err
		}
		tracer, err := k.Tracer(t.Context(), held)
		if err != nil {
			t.Fatal(err)
		}
		paths := tracer.Trace(src, dst, routes)
		if err != nil || len(paths) != 1 {
			t.Errorf("%d paths: %v", len(paths), err)
			return err
		}
		x := paths[0].Source
		others := slices.ContainsFunc(x.Ways, func(w foreign.Way) bool { return !w.Masquerade })
		switch {
		case len(x.Ways) > 0 && !x.Through && !others:
			sees = paths[0].Masqueraded
		case len(x.Ways) == 0 && x.Through, len(x.Ways) == 1 && !x.Through && x.Ways[0].Keeps:
			sees = src
		default:
			t.Errorf("%s to %s: %d ways, through %t, if %v", src, dst, len(x.Ways), x.Through, x.Unknown)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return sees
}

package main

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
)

// A wish is a config from its author's point of view.
type wish struct {
	masqLinkLocal, masqLinkLocalIPv6, enableIPv6 bool
	keepHost                                     bool // masqueradeHost: false
	srcIfs, outIfs, nonOutIfs                    []string
	non, force, nonSrc, src                      []netip.Prefix
}

// decides returns the specified verdict.
func (w wish) decides(src, dst netip.Addr, received, leaving string, fromHere, local bool) nft.Verdict {
	linkLocal := dst.IsLinkLocalUnicast() && (dst.Is4() && !w.masqLinkLocal || dst.Is6() && !w.masqLinkLocalIPv6)
	sources := slices.ContainsFunc(w.src, func(p netip.Prefix) bool { return p.Addr().Is6() == src.Is6() })
	switch {
	case local && (dst.Is4() || w.enableIPv6):
		return nft.Local
	case dst.Is6() && !w.enableIPv6, fromHere && w.keepHost, sources && !in(w.src, src), in(w.nonSrc, src):
		return nft.Exempt
	case len(w.srcIfs) > 0 && (fromHere || !named(w.srcIfs, received)), named(w.nonOutIfs, leaving), len(w.outIfs) > 0 &&
		!named(w.outIfs, leaving):
		return nft.Exempt
	case in(w.force, dst):
		return nft.Masqueraded
	case in(w.non, dst), linkLocal:
		return nft.Exempt
	}
	return nft.Masqueraded
}

func in(list []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(a) })
}

func named(list []string, name string) bool {
	return slices.ContainsFunc(list, func(entry string) bool {
		prefix, several := strings.CutSuffix(entry, "*")
		return entry == name || several && strings.HasPrefix(name, prefix)
	})
}

// String returns the config, with each CIDR on a separate line.
func (w wish) String() string {
	var b strings.Builder
	if w.keepHost {
		b.WriteString("masqueradeHost: false\n")
	}
	for key, list := range map[string][]string{
		"masqueradeSrcInterfaces": w.srcIfs, "masqueradeOutInterfaces": w.outIfs, "nonMasqueradeOutInterfaces": w.nonOutIfs,
	} {
		fmt.Fprintf(&b, "%s: [%s]\n", key, strings.Join(list, ", "))
	}
	fmt.Fprintf(&b, "masqLinkLocal: %t\nmasqLinkLocalIPv6: %t\nenableIPv6: %t\n", w.masqLinkLocal, w.masqLinkLocalIPv6,
		w.enableIPv6)
	for key, list := range map[string][]netip.Prefix{
		"nonMasqueradeCIDRs": w.non, "forceMasqueradeCIDRs": w.force, "nonMasqueradeSrcCIDRs": w.nonSrc,
		"masqueradeSrcCIDRs": w.src,
	} {
		fmt.Fprintf(&b, "%s:%s\n", key, map[bool]string{true: " []"}[len(list) == 0])
		for _, p := range list {
			fmt.Fprintf(&b, "- %q\n", p)
		}
	}
	return b.String()
}

// A wisher generates wishes and addresses, often near each other and near the
// ends of ranges.
type wisher struct{ *rand.Rand }

func (r wisher) address(ipv6 bool) netip.Addr {
	low := r.Uint32() & (1<<r.IntN(33) - 1)
	if r.IntN(4) == 0 {
		low = ^low
	}
	if ipv6 {
		high := [...]uint64{0xfd00 << 48, 0xfe80 << 48, 0x20010db8 << 32, r.Uint64(), 0}[r.IntN(5)]
		var b [16]byte
		binary.BigEndian.PutUint64(b[:], high)
		binary.BigEndian.PutUint32(b[12:], low)
		return netip.AddrFrom16(b).Unmap()
	}
	high := [...]uint32{10 << 24, 192<<24 | 168<<16, 169<<24 | 254<<16, 192<<24 | 2<<8, r.Uint32()}[r.IntN(5)]
	return netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, high^low)))
}

func (r wisher) prefixes(most int) []netip.Prefix {
	var list []netip.Prefix
	for range r.IntN(most + 1) {
		a := r.address(r.IntN(2) == 0)
		p := netip.PrefixFrom(a, r.IntN(a.BitLen()+1)).Masked()
		// An IPv4-mapped network is invalid in a config.
		if p.Addr().Is6() && p.Contains(netip.MustParseAddr("::ffff:0:0")) && p.Bits() > 0 {
			continue
		}
		list = append(list, p)
	}
	return list
}

func (r wisher) wish() wish {
	yes := func() bool { return r.IntN(2) == 0 }
	w := wish{masqLinkLocal: yes(), masqLinkLocalIPv6: yes(), enableIPv6: r.IntN(4) > 0, non: r.prefixes(6)}
	if yes() {
		w.force = r.prefixes(3)
	}
	if r.IntN(4) == 0 {
		w.nonSrc = r.prefixes(2)
	}
	if r.IntN(4) == 0 {
		w.src = r.prefixes(2)
	}
	w.keepHost = r.IntN(4) == 0
	for _, list := range []*[]string{&w.srcIfs, &w.outIfs, &w.nonOutIfs} {
		if r.IntN(4) == 0 {
			all := []string{"eth0", "eth*", "cni0", "wg*", "wg7", "e*"}
			*list = []string{all[r.IntN(len(all))], all[r.IntN(len(all))]}
		}
	}
	return w
}

// near returns an address of the family, often one in or next to a CIDR.
func (r wisher) near(w wish, ipv6 bool) netip.Addr {
	all := slices.Concat(w.non, w.force, w.nonSrc, w.src)
	if len(all) > 0 && r.IntN(3) > 0 {
		p := all[r.IntN(len(all))]
		if a := p.Addr(); a.Is6() == ipv6 {
			if r.IntN(2) == 0 && a.Prev().IsValid() {
				return a.Prev()
			}
			return a
		}
	}
	for {
		if a := r.address(ipv6); a.Is6() == ipv6 {
			return a
		}
	}
}

func TestExplainAgreesWithTheSpecification(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	path := filepath.Join(t.TempDir(), "c")
	r := wisher{rand.New(rand.NewPCG(*seed, 0))}
	node := nodeAddresses()
	verdicts := map[nft.Verdict]int{}
	configs := nfttest.Rounds(150, 1000, 1000)
	for i := range configs {
		w := r.wish()
		text := w.String()
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			ipv6 := r.IntN(2) == 0
			src, dst := r.near(w, ipv6), r.near(w, ipv6)
			if r.IntN(10) == 0 {
				dst = node[map[bool]int{true: 1}[ipv6]]
			}
			if r.IntN(10) == 0 || src.IsLoopback() {
				src = node[map[bool]int{true: 1}[ipv6]]
			}
			mode := modes[i%len(modes)]
			if w.keepHost || len(w.srcIfs)+len(w.outIfs)+len(w.nonOutIfs) > 0 {
				mode = nft.ModeNFTables
			}
			received, leaving := routeTo(src).Interface.Name, []string{"eth0", "eth1", "wg0", "wg7"}[r.IntN(4)]
			x := explainJSON(t, dst.String(), "--from", src.String(), "--out", leaving, "--config", path, "--mode", string(mode))
			here := func(a netip.Addr) bool { return a.IsLoopback() || slices.Contains(node, a) }
			want := w.decides(src, dst, received, leaving, here(src), here(dst))
			verdicts[want]++
			if len(x.Answers) != 1 || x.Answers[0].Verdict != want {
				t.Fatalf("seed %d: %s -> %s: %+v, want %s, by:\n%s", *seed, src, dst, x.Answers, want, text)
			}
			checkPlaces(t, path, text, x.Answers[0], src, dst)
		}
	}
	for _, v := range []nft.Verdict{nft.Local, nft.Exempt, nft.Masqueraded} {
		if verdicts[v] < configs/20 {
			t.Errorf("only %d were %s", verdicts[v], v)
		}
	}
}

// checkPlaces checks that each named CIDR contains the address, and is at the
// reported position.
func checkPlaces(t *testing.T, path, text string, a answer.Answer, src, dst netip.Addr) {
	t.Helper()
	lines := strings.Split(text, "\n")
	for _, s := range a.Steps {
		if s.CIDR == "" {
			continue
		}
		asked := dst
		if strings.HasPrefix(s.Question, "source") {
			asked = src
		}
		if p, err := netip.ParsePrefix(s.CIDR); err != nil || !p.Contains(asked) {
			t.Fatalf("%s is not in %s: %v", asked, s.CIDR, err)
		}
		if s.Default {
			if s.CIDR != "169.254.0.0/16" && s.CIDR != "fe80::/10" {
				t.Fatalf("%s is reported to be a default", s.CIDR)
			}
			continue
		}
		number := s.Place.Line
		if s.Place.File != path || number < 1 || number > len(lines) || lines[number-1] != fmt.Sprintf("- %q", s.CIDR) {
			t.Fatalf("%s is reported at %s of:\n%s", s.CIDR, s.Place, text)
		}
	}
}

package main

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"

	"nft-masq-agent/nft/nfttest"
)

// An opening is the connections of a case of testdata/stale.txt.
type opening struct {
	trafficNode
	situation
	flag        string
	port        uint16   // of the last destination
	from        uint16   // the port of sources, if it is not 0
	stale, left []string // "PROTOCOL DESTINATION"
}

// open opens connections by the words of a line: protocols, and addresses.
func (o *opening) open(words []string) (all []string) {
	o.t.Helper()
	translated := words[0] == "translated"
	if translated {
		words = words[1:]
	}
	first := slices.IndexFunc(words, func(w string) bool { return strings.ContainsAny(w, ".:") })
	for _, proto := range words[:first] {
		for _, host := range words[first:] {
			o.port++
			if o.from != 0 {
				*o.trafficNode.port = o.from
			}
			dst := netip.AddrPortFrom(netip.MustParseAddr(host), o.port)
			all = append(all, proto+" "+dst.String())
			if proto == "node" { // UDP to an address of it
				all[len(all)-1] = "udp " + dst.String()
				nfttest.MustSend(o.t, o.top, nfttest.Flow{Proto: nfttest.UDP, From: o.top.Pod, To: o.top.Node, Dst: dst})
				continue
			}
			if s := o.trafficNode.open(nfttest.Proto(proto), dst.String()); translated && !s.Masqueraded() {
				o.t.Errorf("%s is not masqueraded", dst)
			}
		}
	}
	return all
}

// step does what a line says.
func (o *opening) step(word, text string, enforce func(config string)) {
	o.t.Helper()
	switch words := strings.Fields(text); word {
	case "enforce":
		enforce(strings.ReplaceAll(text, `\n`, "\n") + "\n")
	case "load":
		o.nft(o.rules)
	case "run":
		nfttest.Run(o.t, o.NS, "", words[0], words[1:]...)
	case "route": // the kernel adds that to an address of IPv6 later
		nfttest.Until(o.t, text, func() bool {
			return strings.Contains(nfttest.Run(o.t, o.NS, "", "ip", "-6", "route", "show", "table", "local"), text)
		})
	case "from":
		from, err := strconv.ParseUint(text, 10, 16)
		o.check(err)
		o.from = uint16(from)
	case "stale":
		o.stale = append(o.stale, o.open(words)...)
	case "spared":
		o.left = append(o.left, o.open(words)...)
	}
}

// destinations are those of the connections that the command lists.
func (n trafficNode) destinations(args ...string) (all []string) {
	n.t.Helper()
	for _, c := range n.connections(args...) {
		all = append(all, c.Protocol+" "+cmp.Or(c.Requested, c.Destination))
	}
	slices.Sort(all)
	return all
}

func sorted(list []string) []string { return slices.Sorted(slices.Values(list)) }

// play plays the lines, and checks which connections are stale then, and deletes them.
func (o *opening) play() {
	o.t.Helper()
	for _, line := range o.lines {
		o.step(line[0], line[1], func(config string) { o.enforce(config, "--enable-ipv6", o.flag) })
	}
	if got := o.destinations("--stale"); !slices.Equal(got, sorted(o.stale)) {
		o.t.Errorf("stale: %q, want %q", got, sorted(o.stale))
	}
	r, _ := o.status(*o.flags...)
	contradicting := 0
	for _, entry := range r.Evidence {
		contradicting += entry.Stale + entry.Overruled + entry.Undated
	}
	got := o.run(slices.Concat([]string{"connections", "--flush", "--yes"}, *o.flags)...)
	if got.code != exitDone || contradicting != len(o.stale) {
		o.t.Errorf("%+v, status: %+v", got, r)
	}
	if left := o.destinations(); !slices.Equal(left, sorted(o.left)) {
		o.t.Errorf("left: %q, want %q", left, sorted(o.left))
	}
}

func TestOnlyWhatContradictsThePolicyIsListedAndDeleted(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-nft", "ip6tables-nft")
	for _, s := range situations(t, "stale") {
		for _, mode := range modes {
			if m := s.of("mode"); m != nil && m[0] != string(mode) {
				continue
			}
			t.Run(s.place+" "+string(mode), func(t *testing.T) {
				t.Parallel()
				n := newTrafficNode(t)
				n.lasting()
				(&opening{trafficNode: n, situation: s, flag: "--mode=" + string(mode), port: 5000}).play()
			})
		}
	}
}

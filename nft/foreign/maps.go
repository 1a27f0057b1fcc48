package foreign

import (
	"bytes"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// A verdict is an element of a verdict map, and the packets that it is for.
type verdict struct {
	match
	nfnetlink.Element
}

// lookup returns the verdicts that a map may have for packets. unread means that they are
// not known.
func (w *walker) lookup(c *Chain, s rule.Statement, q path) (found []verdict, unread bool) {
	m, ok := w.maps[id{c.Family, c.Table, s.Expr.Str(unix.NFTA_LOOKUP_SET)}]
	if !ok || w.spent() {
		return nil, true
	}
	words, _, _ := strings.Cut(s.String(), " vmap @")
	fields := strings.Split(words, " . ")
	for _, e := range w.candidates(fields, nil, m, q.packets) {
		if e.truth != yes {
			e.conditions = []condition{newCondition(s, other, true)}
		} else if w.conn == nil || len(q.without(box{e.src, e.dst})) > 0 {
			e.conditions = []condition{newCondition(s, destination, true)}
		}
		e.direct = slices.ContainsFunc(fields, func(f string) bool { return fieldOf(f) == destination })
		found = append(found, e)
	}
	return found, false
}

// anyVerdict returns the verdicts that an unread map may have: any, and a jump to any
// chain of the table that is not a base chain.
func (w *walker) anyVerdict(c *Chain, s rule.Statement) []verdict {
	m := match{truth: maybe, conditions: []condition{newCondition(s, other, true)}}
	found := []verdict{{m, nfnetlink.Element{Code: unix.NFT_RETURN}}, {m, nfnetlink.Element{Code: accept}}}
	for _, to := range w.Chains {
		if to.Hook == nil && to.Family == c.Family && to.Table == c.Table {
			found = append(found, verdict{m, nfnetlink.Element{Code: unix.NFT_JUMP, Chain: to.Name}})
		}
	}
	return found
}

// A mapping is the content of a map. In one of intervals, an element is the first key
// of an interval, and End marks the key after the last.
type mapping struct {
	elements []nfnetlink.Element // sorted by key
	interval bool
}

func newMapping(elements []nfnetlink.Element, interval bool) mapping {
	slices.SortStableFunc(elements, func(a, b nfnetlink.Element) int {
		if c := bytes.Compare(a.Key, b.Key); c != 0 || a.End == b.End {
			return c
		}
		return either(a.End, -1, 1)
	})
	return mapping{slices.Clip(elements), interval}
}

// candidates returns the elements that may be for some of the packets. mask is applied to
// the field.
func (w *walker) candidates(fields []string, mask []byte, m mapping, p packets) (all []verdict) {
	catchAll := len(m.elements) > 0 && len(m.elements[0].Key) == 0 // the catch-all element *
	rest, sure := p, true                                          // for that
	for i, e := range m.elements {
		if e.End || len(e.Key) == 0 {
			continue
		}
		is := w.hasKey(fields, mask, m, i, p)
		w.work += len(p)
		if is.truth == no || len(p.in(is.src, is.dst)) == 0 {
			continue
		}
		if e.Limited {
			is.truth = maybe
		}
		if all = append(all, verdict{is, e}); catchAll && is.truth == yes {
			rest = w.cut(rest, is)
		}
		sure = sure && is.truth == yes
	}
	if catchAll && len(rest) > 0 {
		e := m.elements[0]
		src, dst := rest.addresses()
		sure = sure && !e.Limited && len(rest) == 1 && !w.spent()
		all = append(all, verdict{match{src: src, dst: dst, truth: either(sure, yes, maybe)}, e})
	}
	return all
}

// cut returns the packets that do not match, or more if there are too many ranges.
func (w *walker) cut(p packets, m match) packets {
	if w.work += p.size(); w.spent() || len(p) > maxBoxes {
		return p
	}
	return p.without(box{m.src, m.dst})
}

// last returns the last address of the interval that begins with an element.
func (m mapping) last(i int) netip.Addr {
	if i+1 == len(m.elements) {
		return iprange.All(len(m.elements[i].Key) == 16).To
	}
	next, _ := netip.AddrFromSlice(m.elements[i+1].Key)
	return next.Prev()
}

func fieldOf(name string) field {
	switch name {
	case "ip saddr", "ip6 saddr":
		return source
	case "ip daddr", "ip6 daddr":
		return destination
	}
	return other
}

// hasKey returns which packets have the key of an element, or one in the interval that begins
// with it. Each component of a concatenation is padded to four bytes.
func (w *walker) hasKey(fields []string, mask []byte, in mapping, i int, p packets) match {
	if in.interval && (len(fields) > 1 || mask != nil || fieldOf(fields[0]) == other) {
		return match{truth: maybe}
	}
	m, key := match{truth: yes}, in.elements[i].Key
	for _, f := range fields {
		size := 4
		if strings.HasPrefix(f, "ip6 ") {
			size = 16
		} else if strings.HasSuffix(f, "ifname") {
			size = unix.IFNAMSIZ
		}
		if len(key) < size && len(fields) > 1 {
			return match{truth: maybe}
		}
		part := key[:min(size, len(key))]
		key = key[len(part):]
		of := fieldOf(f)
		a, isAddress := netip.AddrFromSlice(part)
		r := iprange.Range{From: a, To: a}
		if in.interval {
			r.To = in.last(i)
		}
		switch {
		case f == "iifname" || f == "oifname":
			m.truth = min(m.truth, w.facts.named(f, part))
		case of == other || !isAddress:
			m.truth = min(m.truth, maybe)
		case mask != nil:
			is := maybe
			if have, single := p.single(of == source); single {
				is = truthOf(bytes.Equal(part, masked(have, mask)))
			}
			m.truth = min(m.truth, is)
		case of == source && m.src == nil:
			m.src = []iprange.Range{r}
		case of == destination && m.dst == nil:
			m.dst = []iprange.Range{r}
		default:
			m.truth = min(m.truth, maybe)
		}
	}
	return m
}

// masked returns the bits of an address that a mask keeps.
func masked(a netip.Addr, mask []byte) []byte {
	key := a.AsSlice()
	for i := range min(len(key), len(mask)) {
		key[i] &= mask[i]
	}
	return key
}

// toAddress returns the addresses to which a rule may translate packets by a map, sorted;
// none and whether there is one for each of them.
func (w *walker) toAddress(p packets, r nfnetlink.Rule, n rule.NAT) (all []netip.Addr, found truth) {
	m, read := w.maps[id{r.Family, r.Table, n.ToMap}]
	if !read {
		return nil, maybe
	}
	candidates := w.candidates([]string{n.ToField}, n.ToMask, m, p)
	limited, rest := false, p
	for _, e := range candidates {
		if value, ok := netip.AddrFromSlice(e.Value); ok {
			all = append(all, value)
		}
		if limited = limited || e.Limited; e.truth == yes {
			rest = w.cut(rest, e.match)
		}
	}
	keys := 1 // that there can be
	for _, b := range n.ToMask {
		for ; b != 0 && keys <= len(m.elements); b &= b - 1 {
			keys *= 2
		}
	}
	switch {
	case len(rest) == 0, n.ToMask != nil && len(candidates) >= keys && !limited:
		found = yes
	case len(candidates) > 0:
		found = maybe
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all), found
}

package conntrack

import (
	"net/netip"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/judge"
)

// A Finding is the result of comparing a connection with a policy.
type Finding uint8

// The findings. All but the first two are reasons why a connection is no evidence about a policy.
const (
	// Agrees: the translation of the connection is that of the policy.
	Agrees Finding = iota
	// Contradicts: the destination sees another address than the source's although the policy exempts
	// the connection, or the source's own although the policy masquerades it, or one that snatAddresses
	// and snatRules do not allow. It may be closed: [History.Age] says whether it is evidence then.
	Contradicts
	// InZone: the zone is not 0. Open vSwitch and tc track and translate connections there themselves.
	InZone
	// Helped: a helper expected the connection, and translated it like the first one.
	Helped
	// OfNode: it is from or to the node itself, or to multicast or broadcast.
	OfNode
	// Hairpin: it is from an address to itself, when a Service or a host port sends a pod back to itself:
	// that works only if it is translated.
	Hairpin
	// Bridged: a bridge may have forwarded it. nf_conntrack_bridge tracks such connections, and they pass
	// no chain that translates.
	Bridged
	// FamilyOff: the policy has no IPv6, so it exempts the connection.
	FamilyOff
	// Closed: no further packets are expected, and nothing says that another program decided.
	Closed
	// OfSource: the policy does not concern the source.
	OfSource
	// OnInterface: the verdict depends on an interface that is not known, because the node has no route, or there are
	// more than 1,024 pairs of addresses.
	OnInterface
	// ToService: the policy exempts the connection, but its destination was translated, too. kube-proxy
	// and portmap masquerade such connections where replies need it.
	ToService

	findings // how many there are
)

// String returns the name of the finding in metrics and JSON.
func (f Finding) String() string {
	return [findings]string{
		"agrees", "contradicts", "zone", "helper", "node", "hairpin", "bridge", "family", "closed", "source", "interface",
		"service",
	}[f]
}

// A Comparison compares connections with a policy, on a node. It asks about no rule of another
// program: an entry shows what all rules together did.
type Comparison struct {
	*Node
	policy nft.Policy
}

// NewComparison returns the comparison with a policy.
func NewComparison(p nft.Policy, n *Node) *Comparison { return &Comparison{n, p} }

// ReadComparison returns that with a policy on the node of the calling thread.
func ReadComparison(p nft.Policy) (*Comparison, error) {
	node, err := ReadNode()
	if err != nil {
		return nil, err
	}
	return NewComparison(p, node), nil
}

// Compare returns the ruling of the policy for a new connection from the same source to the same
// destination, after DNAT, and whether the entry agrees with it. The ruling is the zero value if the
// policy is not asked, because of a finding from [InZone] to [Bridged].
func (c *Comparison) Compare(e *Entry) (judge.Ruling, Finding) {
	if f := c.exclusion(e); f != Agrees {
		return judge.Ruling{}, f
	}
	ruling, right := c.ruling(e)
	switch {
	case ruling.Key == config.KeyEnableIPv6:
		return ruling, FamilyOff
	case ruling.OfSource:
		return ruling, OfSource
	case ruling.Depends:
		return ruling, OnInterface
	case right && !e.Open():
		return ruling, Closed
	case right:
		return ruling, Agrees
	case ruling.Verdict == nft.Exempt && e.translatedDestination():
		return ruling, ToService
	}
	return ruling, Contradicts
}

// exclusion returns why the translation of a connection does not depend on the policy; Agrees: it does.
func (c *Comparison) exclusion(e *Entry) Finding {
	src := e.Original.Src.Addr()
	dst := e.Destination().Addr()
	switch {
	case e.Zone != 0:
		return InZone
	case e.Status&Expected != 0:
		return Helped
	case src == dst:
		return Hairpin
	case c.delivered.Contains(src), c.delivered.Contains(dst), dst.IsMulticast():
		return OfNode
	case c.bridged(src, dst):
		return Bridged
	}
	return Agrees
}

// ruling returns the ruling of the policy, and whether the entry is translated accordingly. A family
// that is off is exempt.
func (c *Comparison) ruling(e *Entry) (r judge.Ruling, right bool) {
	src := e.Original.Src.Addr()
	dst := e.Destination().Addr()
	seen := e.SeenAs().Addr()
	f, enabled := c.policy.Family(dst.Is6())
	if !enabled {
		entry := judge.Entry{Key: config.KeyEnableIPv6, IPv6: dst.Is6(), Verdict: nft.Exempt}
		return judge.Ruling{Entry: entry}, seen == src
	}
	connection := nft.Connection{Src: src, Dst: dst}
	r = judge.Rule(&f, connection)
	if r.Depends {
		connection.InInterface = c.interfaceTo(netip.Addr{}, src)
		r = judge.Rule(&f, connection)
	}
	if r.Depends {
		connection.OutInterface = c.interfaceTo(src, dst)
		r = judge.Rule(&f, connection)
	}
	switch {
	case r.Verdict == nft.Exempt:
		return r, seen == src
	case seen == src:
		return r, false
	case len(f.SNAT) == 0:
		return r, true
	}
	return r, judge.AllowsSource(f, src, dst, seen, c.delivered.Contains(seen))
}

// translatedDestination reports whether the destination was translated, by DNAT or by IPVS.
func (e *Entry) translatedDestination() bool { return e.Original.Dst != e.Destination() }

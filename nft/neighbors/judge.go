package neighbors

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/older"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/trace"
)

// Judge returns a judge of connections for the policy that is wanted on this node.
func (s *State) Judge() (*conntrack.Judge, error) {
	e, err := s.Evidence()
	if err != nil {
		return nil, err
	}
	return conntrack.NewJudge(s.Want.Policy, e), nil
}

// Candidates returns a judge that knows no other programs: they can only spare connections that
// it finds stale.
func Candidates(p nft.Policy) (*conntrack.Judge, error) {
	e, err := received()
	if err != nil {
		return nil, err
	}
	e.Others = func(netip.Addr, netip.Addr, bool) bool { return false }
	return conntrack.NewJudge(p, e), nil
}

// received returns what a judge must know of this node, without other programs.
func received() (e conntrack.Beside, err error) {
	if e.Local, err = routes.LocalInAnyTable(); err == nil {
		e.Delivered, err = routes.Delivered()
	}
	return e, err
}

// Evidence returns what a judge must know of this node. If anything cannot be read, no
// connection is certain to be stale.
func (s *State) Evidence() (e conntrack.Beside, err error) {
	if e, err = received(); err != nil {
		return e, err
	}
	if s.others.Unread > 0 {
		e.Spared = append(e.Spared, "other programs have too many rules: they may translate any connection")
	}
	asker := sync.OnceValue(s.asker)
	legacy := map[bool]bool{} // by whether it is IPv6
	tables, err := older.LegacyTables("/proc/thread-self/net")
	if err != nil {
		return e, err
	}
	for _, table := range tables {
		if table.Table == "nat" && table.Rules > 0 {
			legacy[table.Family == nfnetlink.IPv6] = true
			e.Spared = append(e.Spared, fmt.Sprintf("%s lists rules of other programs: they may translate any connection "+
				"of the family", table.Command()))
		}
	}
	networks, err := routes.Networks()
	behindOne := oneInterface(networks)
	e.Others = func(src, dst netip.Addr, dnat bool) bool {
		return legacy[dst.Is6()] || asker().mayTranslate(src, dst, dnat) || behindOne(src, dst)
	}
	return e, err
}

// An asker asks whether other programs may have translated connections.
type asker struct {
	*trace.Tracer
	ends   trace.Ends
	shared bool // our chain is reached from a base chain that is not ours
	known  map[asked]bool
}

// An asked is what an answer is kept by.
type asked struct {
	src, dst netip.Addr
	dnat     bool
}

func (s *State) asker() *asker {
	rules, err := s.passed()
	if err != nil {
		rules = &trace.Rules{Unread: 1} // they may do anything
	}
	t := trace.New(rules)
	return &asker{t, t.Ends(math.MaxInt), s.Want.Mode() == nft.ModeIPTables, map[asked]bool{}}
}

// mayTranslate reports whether another program's rule may have translated a connection, also to its
// own address, written addresses into its packets, or ended the base chain before it reached ours. It
// asks what happens to the packet, once for those that the rules treat alike.
func (a *asker) mayTranslate(src, dst netip.Addr, dnat bool) bool {
	src, dst = alike(a.ends, src, dst)
	at := asked{src, dst, dnat}
	if may, known := a.known[at]; known {
		return may
	}
	p := trace.Packet{Src: src, Dst: dst, SrcType: unix.RTN_UNICAST, DstType: unix.RTN_UNICAST, Known: true}
	if dnat {
		p.Translated = trace.Yes
	}
	r := a.At(p, unix.NF_INET_PRE_ROUTING, unix.NF_INET_FORWARD, unix.NF_INET_POST_ROUTING)
	may, ours := a.Unread > 0 || slices.Contains(r.Unknown, trace.TooMany), false
	for _, f := range r.Findings {
		ours = ours || f.Code == trace.Ours && f.Sure
		may = may || f.Code == trace.Rewrites || f.OfSource() && !f.Ends()
	}
	a.known[at] = may || a.shared && !ours
	return a.known[at]
}

// oneInterface returns a function that reports whether two addresses are behind the same
// interface. If that is a bridge, or part of one, it may have forwarded what they exchange.
func oneInterface(networks []routes.Network) func(a, b netip.Addr) bool {
	routes := map[netip.Prefix][]string{}
	var lengths []int // of the prefixes, the longest first
	for _, n := range networks {
		routes[n.Prefix] = append(routes[n.Prefix], n.Interface)
		if at, found := slices.BinarySearchFunc(lengths, n.Bits(), func(a, b int) int { return b - a }); !found {
			lengths = slices.Insert(lengths, at, n.Bits())
		}
	}
	behind := func(a netip.Addr) []string {
		for _, bits := range lengths {
			if p, _ := a.Prefix(bits); routes[p] != nil {
				return routes[p]
			}
		}
		return nil
	}
	return func(a, b netip.Addr) bool {
		of := behind(b)
		return slices.ContainsFunc(behind(a), func(name string) bool { return slices.Contains(of, name) })
	}
}

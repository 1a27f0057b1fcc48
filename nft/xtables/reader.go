package xtables

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// A Reader reads our chains in the shared tables of iptables-nft. It implements
// [layout.Reader].
type Reader struct {
	conn *nfnetlink.Conn
	// What was found in POSTROUTING and in our chains, for IPv4 and IPv6.
	jumps [2]Jump
	marks [2]trust
	// When chains were last read or written, and how long that took.
	LastRead time.Time
	LastCost time.Duration
	planned  time.Time // when writing them began
	// BigChain is the number of CIDRs from which on chains are not read on every change.
	BigChain int
	ruleCounters
}

// NewReader returns a reader that uses a connection.
func NewReader(c *nfnetlink.Conn) *Reader {
	return &Reader{conn: c, BigChain: bigChain, ruleCounters: ruleCounters{conn: c.Another()}}
}

// Mode implements [layout.Reader].
func (r *Reader) Mode() nft.Mode { return nft.ModeIPTables }

func families() [2]nfnetlink.Family { return [2]nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} }

// held is our chains in the kernel. It implements [layout.Held].
type held struct {
	*Reader
	nat    []*Shared // IPv4 and IPv6, if requested
	inFull bool
}

// chainOf returns the name of the wanted chain; false if another layout is wanted.
func chainOf(want nft.Ruleset) (string, bool) {
	l, ok := want.Layout.(Layout)
	return l.Name, ok
}

// tableOf returns the wanted table of a family, nil if none is wanted.
func tableOf(want nft.Ruleset, f nfnetlink.Family) *nft.Table {
	if _, ok := chainOf(want); !ok {
		return nil
	}
	for i := range want.Tables {
		if want.Tables[i].Family == f {
			return &want.Tables[i]
		}
	}
	return nil
}

// Read implements [layout.Reader].
func (r *Reader) Read(ctx context.Context, want nft.Ruleset, s layout.Scope) (layout.Held, error) {
	h := &held{Reader: r, inFull: true}
	var names []string
	if chain, ok := chainOf(want); ok {
		names = WithSubchains(chain)
	} else if !s.Others {
		return h, nil
	}
	trust := r.trusts(want, s)
	trusted := false
	start := time.Now()
	defer func() {
		if !trusted && s.Since == nil && !s.Owners {
			r.LastRead, r.LastCost = time.Now(), time.Since(start)
		}
	}()
	for i, f := range families() {
		how := Reading{Others: s.Others, Quick: s.Quick && trust, Long: r.BigChain}
		if since, ok := s.Since.(*held); ok && i < len(since.nat) {
			how.Since = since.nat[i]
		}
		if !s.Others {
			how.Seen = r.jumps[i]
		}
		if s.Owners {
			how.Skip = want.Chain()
		}
		if trust {
			how.Trust = r.marks[i]
		}
		t := tableOf(want, f)
		if t != nil {
			how.Most = slack
			for _, c := range t.Chains {
				how.Most += len(c.Rules)
			}
		}
		n, err := ReadShared(r.conn.In(ctx), f, names, how)
		if err != nil {
			return nil, err
		}
		if err := n.Hidden(); t != nil && err != nil {
			return nil, err
		}
		h.nat = append(h.nat, n)
		trusted = trusted || n.Trusted()
		if t != nil && !n.Partial {
			r.jumps[i] = n.Jump(*t, want.Chain())
		}
	}
	h.inFull = !trusted || s.InFull && s.Unchanged
	return h, nil
}

// bigChain is the size from which on a chain is not read on every change of the
// ruleset: the kernel walks it from the start for every page of a dump.
const bigChain = 5_000

// trusts reports whether verified chains need not be read while they are the same
// with the same length: the ruleset has not changed since, or they are big. Big
// chains are read occasionally, so that reading takes no more than 1 % of a CPU.
func (r *Reader) trusts(want nft.Ruleset, s layout.Scope) bool {
	if _, ok := chainOf(want); !ok || !s.Same {
		return false
	}
	if s.Quick || s.Unchanged && (s.InFull || !s.Full) {
		return true
	}
	v4, v6 := want.CIDRs()
	return !s.Full && v4+v6 > r.BigChain && time.Since(r.LastRead) < 100*r.LastCost
}

// Recreate implements [layout.Reader]: the tables are shared.
func (r *Reader) Recreate(context.Context, nft.Ruleset) (time.Duration, error) {
	return 0, layout.ErrNotPossible
}

// ReadBack implements [layout.Reader].
func (r *Reader) ReadBack(ctx context.Context, chain string, alike bool) (*layout.Found, error) {
	h, err := r.Read(ctx, nft.Ruleset{}, layout.Scope{Others: true})
	if err != nil {
		return nil, err
	}
	of := (*Shared).Ours
	if alike {
		of = (*Shared).alike
	}
	nat := h.(*held).nat
	if found := readExactly(nat[0], nat[1], of); found != nil || chain == "" {
		return found, nil
	}
	wanted := nft.Ruleset{Layout: Layout{chain}}
	if h, err = r.Read(ctx, wanted, layout.Scope{Rules: true}); err != nil {
		return nil, err
	}
	p := nft.Policy{}
	for _, n := range h.(*held).nat {
		if !n.jumpsTo(chain) || !alike && n.Unsigned(chain) {
			continue
		}
		of := n.Held(OwnChain{Name: chain, Text: chain})
		of.Families = append(p.Families, of.Families...)
		p = of
	}
	if len(p.Families) == 0 {
		return nil, nil
	}
	return &layout.Found{Ruleset: nft.CompilePolicy(p, Layout{chain})}, nil
}

// readExactly reads back a policy from the first of the chains, nil if there is none.
func readExactly(four, six *Shared, of func(*Shared) []OwnChain) *layout.Found {
	chains := of(four)
	if len(chains) == 0 {
		return nil
	}
	chain := chains[0].Text
	p, err := four.Policy(chains[0])
	if err != nil {
		return nil
	}
	for _, c := range of(six) {
		if more, err := six.Policy(c); err == nil && c.Text == chain && len(p.Families) == 1 {
			p.Families = append(p.Families, more.Families...)
		}
	}
	return &layout.Found{Ruleset: nft.CompilePolicy(p, Layout{chain}), Ours: four.signed(chains[0]), Exact: true}
}

func (h *held) InFull() bool { return h.inFull }

func (h *held) Differences(want nft.Ruleset) (diffs []string) {
	for _, n := range h.nat {
		if t := tableOf(want, n.Family); t != nil {
			diffs = append(diffs, n.Differences(*t, want.Chain())...)
		}
	}
	return diffs
}

func (h *held) Unsigned(want nft.Ruleset) (diffs []string) {
	for _, n := range h.nat {
		if tableOf(want, n.Family) != nil && n.Unsigned(want.Chain()) {
			diffs = append(diffs, fmt.Sprintf("table %s nat: chain %s was written by another agent or version", n.Family, want.Chain()))
		}
	}
	return diffs
}

// leftovers returns our chains of a table that are not wanted.
func leftovers(n *Shared, want nft.Ruleset) []OwnChain {
	chain, _ := chainOf(want)
	return n.Leftovers(chain, tableOf(want, n.Family) != nil)
}

func (h *held) Leftovers(want nft.Ruleset) (left []layout.Leftover) {
	for _, n := range h.nat {
		for _, c := range leftovers(n, want) {
			left = append(left, layout.Leftover{
				Name: fmt.Sprintf("chain %s", c), Mode: nft.ModeIPTables, Place: fmt.Sprintf(" in table %s nat", n.Family),
			})
		}
	}
	return left
}

func (h *held) Check(want nft.Ruleset, first bool) error {
	for _, n := range h.nat {
		if first && n.Foreign(want.Chain()) {
			return fmt.Errorf("chain %q in table %s nat: %w", want.Chain(), n.Family, nft.ErrForeignChain)
		}
	}
	for _, n := range h.nat {
		// Our jump would be in a chain that iptables does not use.
		if wrong := n.wrongHook(); wrong != "" && tableOf(want, n.Family) != nil {
			return fmt.Errorf("%s: %w; move its rules and run nft delete chain %s %s %s, or use mode %s",
				wrong, nft.ErrForeignPostrouting, n.Family, NATTable, Postrouting, nft.ModeNFTables)
		}
	}
	return nil
}

func (h *held) Replaces(want nft.Ruleset) (found []foreign.LegacyChain) {
	for _, n := range h.nat {
		rules, jumps := n.unrecognized(want.Chain())
		if len(rules) == 0 {
			continue
		}
		found = append(found, foreign.LegacyChain{
			Family: n.Family, Table: NATTable, Name: want.Chain(), Jumps: jumps, Rules: len(rules),
			RandomFully: slices.ContainsFunc(rules, rule.RandomFully),
		})
	}
	return found
}

// Owns implements [layout.Held]: chains of the wanted name are or will be ours,
// and so are those that some config of this version compiles to.
func (h *held) Owns(want nft.Ruleset) func(nfnetlink.Chain) bool {
	ours := map[nfnetlink.Family][]string{}
	for _, n := range h.nat {
		chains := n.Ours()
		if tableOf(want, n.Family) != nil {
			chains = append(chains, OwnChain{Name: want.Chain(), Text: want.Chain()})
		}
		for _, c := range chains {
			ours[n.Family] = append(ours[n.Family], c.Members()...)
		}
	}
	return func(c nfnetlink.Chain) bool { return c.Table == NATTable && slices.Contains(ours[c.Family], c.Name) }
}

// Stage implements [layout.Held]: there is nothing to stage.
func (h *held) Stage(context.Context, nft.Ruleset) (layout.Staged, error) {
	return layout.Staged{}, nil
}

// Plan implements [layout.Held]. The kernel does not wake a table and create a
// base chain in it in one transaction, so a dormant table without POSTROUTING is
// woken first.
func (h *held) Plan(want nft.Ruleset, _ layout.Staged, p *layout.Plan) error {
	h.planned = time.Now()
	for _, n := range h.nat {
		t := tableOf(want, n.Family)
		if t != nil && n.asleep() {
			p.Before.WakeTable(n.table)
		}
		var kept []string
		if t != nil {
			kept = WithSubchains(want.Chain())
			n.ensure(&p.Switch, *t, want.Chain())
		}
		if left := leftovers(n, want); len(left) > 0 {
			for _, name := range n.Remove(&p.Switch, left, kept, t == nil) {
				p.Emptied = append(p.Emptied, layout.ChainID{Family: n.Family, Table: NATTable, Chain: name})
			}
		}
	}
	return nil
}

// Unchanged implements [layout.Held]: for tens of thousands of rules, planning takes
// longer than the time between other programs' transactions.
func (h *held) Unchanged(since layout.Held) bool {
	return slices.EqualFunc(h.nat, since.(*held).nat, (*Shared).unchanged)
}

// Verified implements [layout.Held]: it records the marks of the chains. If another
// program has written since a repair, a chain has a mark only if it has as many rules
// as were written.
func (h *held) Verified(want nft.Ruleset, wrote bool, generation uint32) {
	h.marks = [2]trust{}
	if !wrote {
		for i, n := range h.nat {
			h.marks[i] = n.marks()
		}
		return
	}
	for i, n := range h.nat {
		if tableOf(want, n.Family) != nil {
			h.marks[i] = n.marksOf(h.conn, want.Chain())
		}
	}
	// Reading takes about as long as writing.
	h.LastRead, h.LastCost = time.Now(), max(h.LastCost, time.Since(h.planned))
	if g, err := h.conn.Generation(); err == nil && g == generation {
		return
	}
	for i, marks := range h.marks {
		maps.DeleteFunc(marks, func(name string, m Mark) bool {
			return name != want.Chain() || int(m.use) != len(tableOf(want, families()[i]).Chain(name).Rules)
		})
	}
}

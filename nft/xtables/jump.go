package xtables

import "nft-masq-agent/nft/nfnetlink"

// splitJumps returns the rules of POSTROUTING that lead to the wanted chain: those that are exactly ours, and others,
// such as those of older agents.
func (t *table) splitJumps() (exact, variants []nfnetlink.Rule) {
	jump := t.want.Chain(Postrouting).Bytecode(t.want, nil)[0]
	for _, r := range t.jumps {
		if sameExprs(r, jump) {
			exact = append(exact, r)
		} else {
			variants = append(variants, r)
		}
	}
	return exact, variants
}

// writeJump leaves one jump to our chain in POSTROUTING: at the end, unless there is one already.
func (s *State) writeJump(b *nfnetlink.Batch, t *table) {
	post := t.want.Chain(Postrouting)
	if t.post == nil {
		b.AddChain(post.KernelChain(t.want))
	}
	exact, surplus := t.splitJumps()
	if len(exact) == 0 {
		b.AddRule(post.Bytecode(t.want, nil)[0])
	} else {
		surplus = append(surplus, exact[1:]...)
	}
	for _, r := range surplus {
		b.Require(foundRule{t.Table, r})
		b.DelRule(r)
	}
}

// foundRule is the condition that a rule which is to be deleted by its handle is as it was found.
type foundRule struct {
	table nfnetlink.Table
	rule  nfnetlink.Rule
}

// Check implements [nfnetlink.Precondition].
func (f foundRule) Check(c *nfnetlink.Conn) error {
	if err := c.SameTable(f.table); err != nil {
		return err
	}
	current, err := c.Rule(f.rule.Family, f.rule.Table, f.rule.Chain, f.rule.Handle)
	if err == nil && !sameExprs(current, f.rule) {
		return nfnetlink.ErrReadAgain
	}
	return err
}

package xtables

import (
	"context"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// Stage implements [nft.KernelState]: it wakes dormant tables. The kernel does not wake a table and
// create a base chain in it in one transaction.
func (s *State) Stage(ctx context.Context, commit nft.Commit) error {
	wake := &nfnetlink.Batch{}
	for _, t := range s.tables {
		if t.Dormant() {
			wake.WakeTable(t.Table)
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return commit(wake) // sends nothing if no table is dormant
}

// Switch implements [nft.KernelState]. If anything differs, our chain is written as a whole in both families, also
// where it was correct when it was read: a second agent may have changed it since. This needs no generation, because
// the chain is named, and the jumps that are deleted by their handles have to be as they were found. Nothing has to
// wait for packets in the old rules, so there is no second transaction.
func (s *State) Switch(first, _ *nfnetlink.Batch) {
	if len(s.Differences()) == 0 {
		return
	}
	for _, t := range s.tables {
		s.writeChain(first, t)
		s.writeJump(first, t)
	}
}

// writeChain writes our chain in a shared table again. What other programs have there is not touched.
func (s *State) writeChain(b *nfnetlink.Batch, t *table) {
	chain := nfnetlink.Chain{Family: t.want.Family, Table: NATTable, Name: s.name}
	if !t.exists {
		b.AddTable(t.want.Family, NATTable)
	}
	if t.chain != nil && t.chain.Hook != nil { // nothing can jump to a base chain
		b.FlushChain(chain.ID())
		b.DelChain(chain.ID())
	}
	b.AddChain(chain)
	b.FlushChain(chain.ID()) // another agent may have created it since
	for _, r := range s.bytecode(t.want) {
		b.AddRule(r)
	}
}

// bytecode returns the rules of our chain as we write them: signed, and the last one with the hash of the policy.
func (s *State) bytecode(t nft.Table) []nfnetlink.Rule {
	rules := t.Chain(s.name).Bytecode(t, nil)
	for i := range rules {
		rules[i].UserData = nfnetlink.Signature()
	}
	rules[len(rules)-1].UserData = nfnetlink.SignatureWith(s.hash)
	return rules
}

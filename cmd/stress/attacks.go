package main

import (
	"errors"
	"fmt"
	"runtime"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
)

// An attack is a transaction by which another program changes our rules. What remains masquerades nothing that is
// exempt.
type attack struct {
	name string
	do   func(*nftables.Conn)
}

func attacks(mode nft.Mode) []attack {
	ours := &nftables.Table{Family: nftables.TableFamilyINet, Name: nft.TableName}
	base := &nftables.Chain{Table: ours, Name: "postrouting"}
	nat := &nftables.Table{Family: nftables.TableFamilyIPv4, Name: "nat"}
	if mode == nft.ModeIPTables {
		return []attack{
			{"flush ruleset", (*nftables.Conn).FlushRuleset},
			{"iptables -F of our chain", func(c *nftables.Conn) { c.FlushChain(&nftables.Chain{Table: nat, Name: chain}) }},
			{"iptables -F", func(c *nftables.Conn) { c.FlushChain(&nftables.Chain{Table: nat, Name: "POSTROUTING"}) }},
		}
	}
	return []attack{
		{"flush ruleset", (*nftables.Conn).FlushRuleset},
		{"delete table", func(c *nftables.Conn) { c.DelTable(ours) }},
		{"flush chain", func(c *nftables.Conn) { c.FlushChain(base) }},
		{"foreign accept rule", func(c *nftables.Conn) {
			c.InsertRule(&nftables.Rule{Table: ours, Chain: base, Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}}})
		}},
	}
}

// foreigner opens a connection of another program.
func (b *bench) foreigner() *nftables.Conn {
	c, err := nftables.New(nftables.WithNetNSFd(b.top.Node.Fd()), nftables.AsLasting())
	runtime.KeepAlive(b.top)
	nfttest.Check(err)
	return c
}

// attack runs one attack.
func (b *bench) attack(a attack) {
	c := b.foreigner()
	a.do(c)
	if err := errors.Join(c.Flush(), c.CloseLasting()); err != nil {
		nfttest.Check(fmt.Errorf("attack: %s: %w", a.name, err))
	}
}

package main

import (
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"nft-masq-agent/cmd/stress/knownbad"
	"nft-masq-agent/nft"
)

// An attack is a transaction by which another program changes our rules.
type attack struct {
	name string
	mode nft.Mode
	// leaves means that the remaining rules masquerade nothing that is exempt.
	leaves bool
	do     func(*nftables.Conn) error
}

func attacks() []attack {
	ours := &nftables.Table{Family: nftables.TableFamilyINet, Name: nft.TableName}
	base := &nftables.Chain{Table: ours, Name: "postrouting"}
	nat := &nftables.Table{Family: nftables.TableFamilyIPv4, Name: "nat"}
	return []attack{
		{"flush ruleset", nft.ModeNFTables, true, flushRuleset},
		{"delete table", nft.ModeNFTables, true, func(c *nftables.Conn) error {
			c.DelTable(ours)
			return nil
		}},
		{"flush chain", nft.ModeNFTables, true, func(c *nftables.Conn) error {
			c.FlushChain(base)
			return nil
		}},
		{"foreign accept rule", nft.ModeNFTables, true, func(c *nftables.Conn) error {
			c.InsertRule(&nftables.Rule{Table: ours, Chain: base, Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}}})
			return nil
		}},
		{"delete element", nft.ModeNFTables, false, deleteElement(ours)},
		{"flush ruleset", nft.ModeIPTables, true, flushRuleset},
		{"iptables -F of our chain", nft.ModeIPTables, true, func(c *nftables.Conn) error {
			c.FlushChain(&nftables.Chain{Table: nat, Name: chain})
			return nil
		}},
		{"iptables -F", nft.ModeIPTables, true, func(c *nftables.Conn) error {
			c.FlushChain(&nftables.Chain{Table: nat, Name: "POSTROUTING"})
			return nil
		}},
	}
}

// attacksThatLeave returns the attacks of a mode during which no exempt
// connection may be masqueraded.
func attacksThatLeave(mode nft.Mode) (some []attack) {
	for _, a := range attacks() {
		if a.mode == mode && a.leaves {
			some = append(some, a)
		}
	}
	return some
}

func flushRuleset(c *nftables.Conn) error {
	c.FlushRuleset()
	return nil
}

// deleteElement deletes one CIDR of the set that the rules refer to.
func deleteElement(table *nftables.Table) func(*nftables.Conn) error {
	return func(c *nftables.Conn) error {
		sets, err := c.GetSets(table)
		if err != nil {
			return err
		}
		for _, s := range sets {
			if s.KeyType != nftables.TypeIPAddr {
				continue
			}
			s.Table = table
			lists := lists(0)
			for _, list := range lists {
				elements, err := c.GetSetElements(s)
				if err != nil {
					return err
				}
				for _, e := range elements {
					if !e.IntervalEnd && string(e.Key) == string(list[0].Addr().AsSlice()) {
						return c.SetDeleteElements(s, knownbad.Elements(list[:1]))
					}
				}
			}
		}
		return errors.New("no element to delete")
	}
}

// foreigner opens a connection of another program.
func (b *bench) foreigner() (*nftables.Conn, error) {
	c, err := nftables.New(nftables.WithNetNSFd(b.top.Node.Fd()), nftables.AsLasting())
	runtime.KeepAlive(b.top)
	return c, err
}

// A strike is a completed attack.
type strike struct {
	over time.Time
	port uint32
	conn *nftables.Conn
}

// close closes the attacker's socket. If it has deleted something, the kernel
// blocks all transactions for an RCU grace period.
func (s strike) close() error { return s.conn.CloseLasting() }

// attack runs one attack.
func (b *bench) attack(a attack) (strike, error) {
	c, err := b.foreigner()
	if err != nil {
		return strike{}, err
	}
	port, err := c.GetPortID()
	if err == nil {
		err = errors.Join(a.do(c), c.Flush())
	}
	if err != nil {
		return strike{}, errors.Join(fmt.Errorf("attack: %s: %w", a.name, err), c.CloseLasting())
	}
	return strike{time.Now(), port, c}, nil
}

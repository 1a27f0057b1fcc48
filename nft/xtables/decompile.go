package xtables

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables/userdata"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/rule"
)

// An OwnChain is a chain of ours: its name, and the name in the comments of its
// rules and its jump. After `iptables -E` they differ.
type OwnChain struct{ Name, Text string }

// Members returns the additional chains, which the chain's rules refer to, and
// then the chain.
func (c OwnChain) Members() []string {
	names := WithSubchains(c.Text)
	names[len(names)-1] = c.Name
	return names
}

// String returns the name for messages.
func (c OwnChain) String() string {
	if c.Name == c.Text {
		return nfnetlink.Printable(c.Name)
	}
	return fmt.Sprintf("%s (renamed from %s)", nfnetlink.Printable(c.Name), nfnetlink.Printable(c.Text))
}

// signature is in the user data of each rule that we write into our chains. It
// distinguishes them from chains with the same text, which ip-masq-agent up to
// v2.0.0 writes. iptables and nft neither show nor preserve it.
var signature = userdata.AppendString(nil, signatureType, nft.TableName)

// signatureType is a type of user data that iptables and nft do not know.
const signatureType = 200

func signed(r nfnetlink.Rule) bool {
	return rule.UserData(r.UserData, signatureType) == nft.TableName
}

// signed reports whether we wrote rules of the chain. One signed rule is enough:
// another program may have restored others.
func (n *Shared) signed(c OwnChain) bool {
	return slices.ContainsFunc(c.Members(), func(name string) bool { return slices.ContainsFunc(n.chains[name], signed) })
}

// jumpOf returns the target of a rule that is exactly the jump that we create for
// the chain named in its comment. The kernel allows longer names than iptables,
// and than fit our comment.
func jumpOf(r nfnetlink.Rule) (OwnChain, bool) {
	to, ok := rule.Target(r)
	text, ours := chainInComment(rule.Comment(r))
	if !ok || !ours || len(text) > maxChainName {
		return OwnChain{}, false
	}
	return OwnChain{Name: to, Text: text}, slices.ContainsFunc(CommentPrefixes(text), func(prefix string) bool {
		return sameXT(r, sharedJump(r.Family, text, to, prefix))
	})
}

// Ours returns the chains of the table that are ours: we wrote them, and chain
// and jump are exactly what some config of this version compiles to, except for
// the current name of the chain.
func (n *Shared) Ours() []OwnChain { return n.oursIf(n.signed) }

// alike also returns chains of older agents with the same text.
func (n *Shared) alike() []OwnChain {
	return n.oursIf(func(OwnChain) bool { return true })
}

// renamed returns the chains that had this name before another program renamed them.
func (n *Shared) renamed(chain string) []OwnChain {
	return n.oursIf(func(c OwnChain) bool { return c.Text == chain && c.Name != chain && n.signed(c) })
}

func (n *Shared) oursIf(wanted func(OwnChain) bool) []OwnChain {
	var found []OwnChain
	for _, c := range n.named {
		if !wanted(c) || slices.ContainsFunc(found, func(f OwnChain) bool { return f.Name == c.Name }) {
			continue
		}
		if _, err := n.Policy(c); err == nil {
			found = append(found, c)
		}
	}
	return found
}

// Leftovers returns the chains that are ours, or were before another program
// changed them, and are not wanted.
func (n *Shared) Leftovers(chain string, wanted bool) []OwnChain {
	// The wanted chain need not be checked rule by rule.
	chains := n.oursIf(func(c OwnChain) bool { return (!wanted || c != OwnChain{chain, chain}) && n.signed(c) })
	named := func(c OwnChain) bool { return c.Name == chain }
	if _, present := n.chains[chain]; present && !wanted && !n.Unsigned(chain) && !slices.ContainsFunc(chains, named) {
		chains = append(chains, OwnChain{chain, chain})
	}
	return chains
}

var errNotOurs = errors.New("no config of this version compiles to these rules")

// Policy reads back the policy of a chain of ours. It is an error if the chain is
// not exactly what this version writes.
func (n *Shared) Policy(c OwnChain) (nft.Policy, error) {
	p := n.Held(c)
	for _, prefix := range CommentPrefixes(c.Text) {
		if n.holds(c, SharedTable(p.Families[0], p, c.Text, prefix)) {
			return p, nil
		}
	}
	return nft.Policy{}, errNotOurs
}

func (n *Shared) holds(c OwnChain, want nft.Table) bool {
	members := c.Members()
	for i, name := range WithSubchains(c.Text) {
		if !slices.EqualFunc(want.Chain(name).Bytecode(want, nil), n.chains[members[i]], sameXT) {
			return false
		}
	}
	return true
}

// Held reads the policy of a chain from the comments of its rules, ignoring rules
// that are not ours.
func (n *Shared) Held(c OwnChain) nft.Policy {
	f := nft.FamilyPolicy{IPv6: n.Family == nfnetlink.IPv6}
	p := nft.Policy{}
	lists := map[string][]config.CIDR{} // by comment
	for _, name := range c.Members() {
		for _, r := range n.chains[name] {
			_, comment, _ := strings.Cut(rule.Comment(r), ": ")
			if comment == CommentMasq {
				p.AddMasquerade(r)
			} else {
				lists[comment] = append(lists[comment], config.CIDR{Prefix: prefixOf(r)})
			}
		}
	}
	for _, row := range config.Conditions() {
		if row.View != "" {
			f.Add(row, nft.NewList(lists[row.View]))
		}
	}
	p.Families = []nft.FamilyPolicy{f}
	return p
}

// prefixOf returns the prefix that a rule of mode iptables-nft matches. A rule
// without one matches the prefix of length 0.
func prefixOf(r nfnetlink.Rule) netip.Prefix {
	p, ok := rule.Prefix(r)
	switch {
	case ok:
		return p
	case r.Family == nfnetlink.IPv6:
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
}

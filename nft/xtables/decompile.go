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

// An OwnChain is a chain of ours: its name, and the one of which its rules and its
// jump speak. After `iptables -E` these are two.
type OwnChain struct{ Name, Text string }

// Members gives the chain behind its further chains, which its rules name.
func (c OwnChain) Members() []string {
	names := WithSubchains(c.Text)
	names[len(names)-1] = c.Name
	return names
}

// String is for people.
func (c OwnChain) String() string {
	if c.Name == c.Text {
		return nfnetlink.Printable(c.Name)
	}
	return fmt.Sprintf("%s (renamed from %s)", nfnetlink.Printable(c.Name), nfnetlink.Printable(c.Text))
}

// signature is left in the user data of each rule that we write into our chains. It
// tells them from chains of the same text that ip-masq-agent up to v2.0.0 writes.
// Neither iptables nor nft shows it, and what they write anew does not bear it.
var signature = userdata.AppendString(nil, signatureType, nft.TableName)

// signatureType is a type of user data that neither iptables nor nft knows.
const signatureType = 200

func signed(r nfnetlink.Rule) bool {
	return rule.UserData(r.UserData, signatureType) == nft.TableName
}

// signed reports whether we wrote rules of the chain. That all of them bear the
// signature is not asked for: somebody may have put one back.
func (n *Shared) signed(c OwnChain) bool {
	return slices.ContainsFunc(c.Members(), func(name string) bool { return slices.ContainsFunc(n.chains[name], signed) })
}

// jumpOf says to which chain a rule leads that is, to the byte, the jump that we
// make to a chain of the name of which it speaks. The kernel knows longer names
// than iptables takes, and than fit our comment.
func jumpOf(r nfnetlink.Rule) (OwnChain, bool) {
	to, ok := rule.Target(r)
	said, ours := sharedJumpSays(rule.Comment(r))
	if !ok || !ours || len(said) > maxChainName {
		return OwnChain{}, false
	}
	return OwnChain{Name: to, Text: said}, slices.ContainsFunc(CommentPrefixes(said), func(prefix string) bool {
		return sameXT(r, sharedJump(r.Family, said, to, prefix))
	})
}

// Ours gives the chains of the table that are ours: we wrote them, and chain and jump
// are exactly what some config of this version yields, but for the name under which
// the chain stands.
func (n *Shared) Ours() []OwnChain { return n.oursWhere(n.signed) }

// alike gives also those that an older agent wrote in the same words.
func (n *Shared) alike() []OwnChain {
	return n.oursWhere(func(OwnChain) bool { return true })
}

// renamed gives those that were the chain until somebody renamed it.
func (n *Shared) renamed(chain string) []OwnChain {
	return n.oursWhere(func(c OwnChain) bool { return c.Text == chain && c.Name != chain && n.signed(c) })
}

func (n *Shared) oursWhere(wanted func(OwnChain) bool) []OwnChain {
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

// Leftovers gives the chains that are ours, or were until somebody changed them, and
// are not wanted.
func (n *Shared) Leftovers(chain string, wanted bool) []OwnChain {
	// Whether the wanted one is ours need not be looked at, rule by rule.
	chains := n.oursWhere(func(c OwnChain) bool { return (!wanted || c != OwnChain{chain, chain}) && n.signed(c) })
	named := func(c OwnChain) bool { return c.Name == chain }
	if _, present := n.chains[chain]; present && !wanted && !n.Unsigned(chain) && !slices.ContainsFunc(chains, named) {
		chains = append(chains, OwnChain{chain, chain})
	}
	return chains
}

var errNotOurs = errors.New("no config of this version yields these rules")

// Policy reads back the policy of a chain of ours; an error says that it is not
// exactly what this version would write.
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

// Held reads the policy of a chain, where the comment of a rule says what it is for;
// rules that are none of ours are left out.
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

// prefixOf returns the prefix that a rule of mode iptables-nft matches. A rule that asks
// for none matches the prefix of length 0.
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

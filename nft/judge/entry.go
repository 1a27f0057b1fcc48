package judge

import (
	"net/netip"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// An Entry is the part of a policy that decides about a connection, and what it decides.
type Entry struct {
	IPv6 bool
	// Key is the key of the config file, "" for anything that no key decides.
	Key string
	// CIDR is the entry of the key's list, as it was written. It is the zero prefix if the key has no
	// list of CIDRs, or the connection is not in it.
	CIDR    netip.Prefix
	Verdict nft.Verdict
}

// String returns the key and the CIDR.
func (e Entry) String() string {
	switch {
	case e.Verdict == nft.Local:
		return "addresses of this node"
	case e.Key == "":
		return "anything else"
	case !e.CIDR.IsValid():
		return e.Key
	}
	return e.Key + " " + e.CIDR.String()
}

// A Ruling is the decision of a policy about a connection of which the interfaces may be unknown.
type Ruling struct {
	Entry
	// OfSource says that the policy does not concern the source: it is none of the pods that the
	// policy names, or one that it leaves out.
	OfSource bool
	// Depends says that the verdict, or whether the source is a pod, depends on an interface that is not known.
	Depends bool
}

// Rule returns the decision of a family's policy about a connection. Interfaces without a name are
// unknown, except that nothing is received from the node itself. It takes one binary search for each
// list.
func Rule(f *nft.FamilyPolicy, c nft.Connection) Ruling {
	r := Ruling{Entry: Entry{IPv6: f.IPv6, Verdict: nft.Masqueraded}}
	if c.ToNode {
		r.Verdict = nft.Local
		return r
	}
	leaving := false // by an interface that is not known, and may decide
	for i := range f.Conditions {
		condition := &f.Conditions[i]
		switch {
		case condition.Asks == config.ReceivedOn && c.InInterface == "" && !c.FromNode:
			r.Depends = true
			continue
		case condition.Asks == config.LeavingBy && c.OutInterface == "":
			leaving = true
			continue
		}
		m := ask(condition, c)
		if m.yes == condition.Outside {
			continue
		}
		r.Key = condition.Key
		r.CIDR = m.cidr
		r.OfSource = condition.Asks == config.SourceAddress || condition.Asks == config.ReceivedOn
		r.Verdict = verdict(condition)
		break
	}
	r.Depends = r.Depends || leaving && r.Verdict == nft.Masqueraded
	return r
}

// verdict is that of a condition which decides.
func verdict(condition *nft.Condition) nft.Verdict {
	if condition.Masquerade {
		return nft.Masqueraded
	}
	return nft.Exempt
}

// A match is the answer to a condition, and the entry of its list that contains the address or matches the interface.
type match struct {
	yes  bool
	cidr netip.Prefix
	link config.Interface
}

// ask asks a condition about a connection.
func ask(condition *nft.Condition, c nft.Connection) (m match) {
	switch condition.Asks {
	case config.SentByNode:
		m.yes = c.FromNode
	case config.ReceivedOn:
		if !c.FromNode {
			m.link, m.yes = matching(condition, c.InInterface)
		}
	case config.LeavingBy:
		m.link, m.yes = matching(condition, c.OutInterface)
	case config.SourceAddress:
		m.cidr, m.yes = condition.Covering(c.Src)
	case config.DestinationAddress:
		m.cidr, m.yes = condition.Covering(c.Dst)
	default:
		condition.Unknown()
	}
	return m
}

// matching returns the entry of a condition that matches the name of an interface. None matches "".
func matching(condition *nft.Condition, name string) (config.Interface, bool) {
	for _, i := range condition.Interfaces {
		if i.Matches(name) {
			return i, true
		}
	}
	return config.Interface{}, false
}

// IsPod reports whether the source of a connection is a pod according to a policy.
func IsPod(f nft.FamilyPolicy, c nft.Connection) bool {
	for i := range f.Conditions {
		condition := &f.Conditions[i]
		if condition.LimitsSources() && ask(condition, c).yes != condition.Outside {
			return false
		}
	}
	return !c.FromNode
}

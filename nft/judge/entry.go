package judge

import (
	"net/netip"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// An Entry is the part of a policy that decides about a connection, and what it decides.
type Entry struct {
	IPv6 bool `json:"ipv6,omitempty"`
	// Key is the key of the config file, "" for anything that no key decides.
	Key string `json:"key,omitempty"`
	// CIDR is the entry of the key's list, as it was written. It is the zero prefix if the key has no
	// list of CIDRs, or the connection is not in it.
	CIDR    netip.Prefix `json:"cidr,omitzero"`
	Verdict nft.Verdict  `json:"verdict"`
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
	// Depends says that the verdict depends on an interface that is not known.
	Depends bool
	// PerhapsNotPod says that the policy knows pods by the interface on which they send, which is
	// not known.
	PerhapsNotPod bool
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
	if c.FromNode {
		c.In = ""
	}
	unknown := false // whether an interface decides that is not known
	for i := range f.Questions {
		q := &f.Questions[i]
		matches := false
		var cidr netip.Prefix
		switch q.Asks {
		case config.SentByNode:
			matches = c.FromNode
		case config.ReceivedOn:
			if c.In == "" && !c.FromNode {
				unknown = true
				r.PerhapsNotPod = true
				continue
			}
			_, _, matches = matching(*q, c.In)
		case config.LeavingBy:
			if c.Out == "" {
				unknown = true
				continue
			}
			_, _, matches = matching(*q, c.Out)
		case config.SourceAddress:
			cidr, matches = q.Covering(c.Src)
		case config.DestinationAddress:
			cidr, matches = q.Covering(c.Dst)
		default:
			q.Unknown()
		}
		if matches == q.Outside {
			continue
		}
		r.Key = q.Key
		r.CIDR = cidr
		r.OfSource = q.Asks == config.SourceAddress || q.Asks == config.ReceivedOn
		if !q.Masquerade {
			r.Verdict = nft.Exempt
		}
		break
	}
	r.Depends = unknown && r.Verdict == nft.Masqueraded
	return r
}

package agent

import (
	"nft-masq-agent/nft"
)

// A Source is the source of the policy enforced on this node.
type Source string

// The sources, as metric, log and status name them.
const (
	FromFile     Source = "file"     // the current config
	FromPrevious Source = "previous" // the last good config, or what a previous run left in the kernel
	FromLenient  Source = "lenient"  // what the older agents read from a file that this one rejects
	FromOlder    Source = "foreign"  // rules of an iptables-based agent; this one writes nothing
	FromDefaults Source = "defaults" // built in
)

// Sources lists all sources.
func Sources() []Source {
	return []Source{FromFile, FromPrevious, FromLenient, FromOlder, FromDefaults}
}

// A policy is the policy that the loop enforces.
type policy struct {
	source   Source       // "" until it is known
	want     *nft.Ruleset // nil: nothing is to be written
	content  content      // what want was compiled from
	accepted bool         // content was accepted in this run
	// inherited are the rules of a previous run, which stay as they are. It is set exactly if source is FromPrevious and
	// accepted is false.
	inherited *nft.Installed
}

// A situation is the state of a node on which no config was accepted in this run.
type situation struct {
	previous *nft.Installed // what a previous run left in the kernel, nil for nothing
	older    bool           // rules of an iptables-based agent are active
	defaults content
}

// nextPolicy returns the policy to enforce from now on. A rejected config changes nothing if one was accepted before.
// Otherwise the order is: what a previous run left, if nothing was enforced in this one; what the older agents would
// enforce; what is enforced already; the older agent's own rules; the defaults.
func nextPolicy(current policy, c content, n situation) policy {
	switch {
	case c.missing != nil:
		return policy{source: FromDefaults, want: c.want, content: c, accepted: true}
	case c.err == nil:
		return policy{source: FromFile, want: c.want, content: c, accepted: true}
	case current.accepted && current.source == FromFile:
		current.source = FromPrevious
		return current
	case current.accepted:
		return current
	case n.previous != nil && current.want == nil:
		return policy{source: FromPrevious, inherited: n.previous}
	case c.want != nil:
		return policy{source: FromLenient, want: c.want, content: c}
	case current.want != nil:
		return current
	case n.older:
		return policy{source: FromOlder}
	}
	return policy{source: FromDefaults, want: n.defaults.want, content: n.defaults}
}

// same reports whether a ruleset is that of this policy, whatever addresses the node has.
func (p policy) same(want *nft.Ruleset) bool {
	if p.want == nil || want == nil {
		return p.want == want
	}
	return p.want == want || p.want.SamePolicy(*want)
}

// hash returns the hash of the enforced policy, "" if none of ours is.
func (p policy) hash() string {
	switch {
	case p.inherited != nil:
		return p.inherited.Hash
	case p.want == nil:
		return ""
	}
	return p.want.Hash()
}

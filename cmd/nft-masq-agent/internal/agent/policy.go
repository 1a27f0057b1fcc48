package agent

import (
	"fmt"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
)

// A Source is the source of the policy enforced on this node.
type Source string

// The sources, as metric, log and status name them.
const (
	FromFile     Source = "file"     // the current config
	FromPrevious Source = "previous" // the last good config, or what a previous run left in the kernel
	FromLenient  Source = "lenient"  // what the older agents read from a file that this one rejects
	FromForeign  Source = "foreign"  // rules of an iptables-based agent; this one writes nothing
	FromDefaults Source = "defaults" // built in
)

// Sources lists all sources.
func Sources() []Source {
	return []Source{FromFile, FromPrevious, FromLenient, FromForeign, FromDefaults}
}

// A policy is the policy that the loop enforces.
type policy struct {
	from     Source          // "" until it is known
	want     *nft.Ruleset    // nil: nothing is to be written
	files    []config.Source // of which want was compiled; none: the built-in defaults
	accepted bool            // from a config that was accepted in this run
	// left is the rules of a previous run, which stay as they are: of the source
	// FromPrevious, unless a config was accepted in this run.
	left *layout.Installed
}

// A content is the result of compiling a content of the config.
type content struct {
	files   []config.Source
	want    *nft.Ruleset // nil: rejected
	absent  bool         // there is no file
	lenient *nft.Ruleset // if rejected: what the older agents make of it, nil if they reject it too
}

// A situation is the state of a node without an accepted config.
type situation struct {
	previous *layout.Installed // what a previous run left in the kernel, nil for nothing
	older    bool              // rules of an iptables-based agent are active
	defaults nft.Ruleset
}

// decide returns what to enforce from now on. A rejected config changes nothing
// if one was accepted before. Otherwise the order is: what a previous run left,
// what the older agents would enforce, the older agent's own rules, the defaults.
func decide(now policy, c content, n situation) policy {
	switch {
	case c.want != nil && c.absent:
		return policy{from: FromDefaults, want: c.want, accepted: true}
	case c.want != nil:
		return policy{from: FromFile, want: c.want, files: c.files, accepted: true}
	case now.accepted && now.from == FromFile:
		return policy{from: FromPrevious, want: now.want, files: now.files, accepted: true}
	case now.accepted:
		return now
	case n.previous != nil:
		return policy{from: FromPrevious, left: n.previous}
	case c.lenient != nil:
		return policy{from: FromLenient, want: c.lenient, files: c.files}
	case now.from == FromLenient:
		return now
	case n.older:
		return policy{from: FromForeign}
	}
	return policy{from: FromDefaults, want: &n.defaults}
}

// needs returns which parts of the node's state decide needs: reading them takes
// time.
func (p policy) needs(c content) (previous, older bool) {
	if c.want != nil || p.accepted {
		return false, false
	}
	return p.want == nil, c.lenient == nil && p.from != FromLenient
}

// same reports whether two policies are enforced alike.
func (p policy) same(o policy) bool {
	return p.from == o.from && (p.want == nil) == (o.want == nil) && (p.want == nil || p.want.Same(*o.want)) && p.hash() == o.hash()
}

// hash returns the hash of what is enforced, "" for nothing of ours.
func (p policy) hash() string {
	switch {
	case p.left != nil:
		return p.left.Hash
	case p.want == nil:
		return ""
	}
	return p.want.Hash()
}

// words describes what is enforced while the config is rejected; held is the hash
// of our rules in the kernel, "" for none.
func (p policy) words(held string) string {
	var what, is string
	switch p.from {
	case "":
		return "nothing is enforced yet because the kernel's rules cannot be read"
	case FromForeign:
		return "the rules of an iptables-based agent stay active, and nothing is written"
	case FromFile:
		what, is = "config", "is"
	case FromPrevious:
		what, is = "config of a previous run", "stays"
		if p.accepted {
			what = "last good config"
		}
	case FromLenient:
		what, is = "what the older agents make of it", "is"
	case FromDefaults:
		what, is = "built-in defaults", "are"
	}
	what += " (" + p.hash() + ")"
	switch {
	case p.left != nil, held == p.hash():
		return what + " " + is + " enforced"
	case held == "":
		return what + " is not in the kernel yet"
	}
	return fmt.Sprintf("%s is not in the kernel yet, which still has %s", what, held)
}

package config

import "gopkg.in/yaml.v3"

// aliases counts what the aliases of a document expand to, without expanding
// them, and allows as much as yaml.v2 and yaml.v3 do where they decode.
type aliases struct {
	lists   folds
	sizes   map[*yaml.Node]int // of anchored nodes that were passed
	total   int
	aliased int
}

// check walks n in the order of the text. It returns the first alias that is
// too much, or stands inside its own anchor, with a message.
func (a *aliases) check(n *yaml.Node) (*yaml.Node, string) {
	before := a.total
	a.total += 1 + len(a.lists[n])
	if n.Kind == yaml.AliasNode {
		size, passed := a.sizes[n.Alias]
		if !passed {
			return n, "the alias is inside its own anchor"
		}
		a.total += size
		a.aliased += size
		if a.total > maxExpanded || a.aliased > 100 && a.total > 1000 && float64(a.aliased) > maxShare*float64(a.total) {
			return n, "the aliases expand to more than a config file may hold: write the values out"
		}
		return nil, ""
	}
	for _, c := range n.Content {
		if bad, msg := a.check(c); bad != nil {
			return bad, msg
		}
	}
	if n.Anchor != "" {
		a.sizes[n] = a.total - before
	}
	return nil, ""
}

// maxShare is how much of a document yaml.v2 lets come from aliases, up to 400,000
// values.
const maxShare = 0.99

// target follows an alias.
func target(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

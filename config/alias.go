package config

import "gopkg.in/yaml.v3"

// aliases counts the values that the aliases of a document expand to, without
// expanding them. It allows as many as yaml.v2 and yaml.v3 do when they decode.
type aliases struct {
	lists   folds
	sizes   map[*yaml.Node]int // of the anchored nodes seen so far
	total   int
	aliased int
}

// check walks n in document order. It returns the first alias that exceeds the
// limit or refers to an anchor it is part of, and a message.
func (a *aliases) check(n *yaml.Node) (*yaml.Node, string) {
	before := a.total
	a.total += 1 + len(a.lists.omitted(n))
	if n.Kind == yaml.AliasNode {
		size, seen := a.sizes[n.Alias]
		if !seen {
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

// maxShare is the share of a document that yaml.v2 allows to come from aliases,
// up to 400,000 values.
const maxShare = 0.99

// target returns the node that an alias refers to, or n itself.
func target(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

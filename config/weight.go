package config

import "strings"

// yaml.v3 takes up to half a kilobyte for a node, and a node takes as little as
// one byte of text. So the nodes are counted before the tree is built.
const (
	maxNodes    = 110_000 // of one Parse
	maxFolded   = 250_000 // CIDRs of one Parse that need no node
	maxLines    = 700_000 // of one file
	maxExpanded = 300_000 // values of one file, aliases expanded
)

// room is what is left of the limits of one Parse.
type room struct{ nodes, folded int }

// take reports whether a YAML text fits, and returns it without its comments if
// only then.
func (r *room) take(s string, runs []run) (string, bool) {
	n := weigh(s, r.nodes)
	if n > r.nodes {
		s = withoutComments(s)
		n = weigh(s, r.nodes)
	}
	for _, run := range runs {
		r.folded -= len(run.cidrs)
	}
	if n > r.nodes || r.folded < 0 {
		return "", false
	}
	r.nodes -= n
	return s, true
}

func (t *text) tooMuch() Problem {
	return Problem{Pos: Position{File: t.name, Line: 1, Col: 1}, Msg: "too many values: a config may have at most 100,000"}
}

// weigh returns the number of nodes that a YAML text makes at most, as far as it
// exceeds the limit. Each node needs an indicator, or is a key with one. What
// looks like an indicator inside of text counts as well, except in comments,
// each of which takes as much as three nodes.
func weigh(s string, limit int) int {
	comma := 1
	if strings.Contains(s, "{") {
		comma = 2 // {a, b} has the values null
	}
	var c comments
	n := 1
	for s != "" && n <= limit {
		var l string
		l, s, _ = strings.Cut(s, "\n")
		if i := c.find(l); i >= 0 {
			n, l = n+3, l[:i]
		}
		n += weighLine(l, comma)
	}
	return n
}

func weighLine(l string, comma int) int {
	n := 0
	if strings.HasPrefix(l, ".") || strings.HasPrefix(l, "%") {
		n++ // an end of document, a directive
	}
	for i := range len(l) {
		switch l[i] {
		case ',':
			n += comma
		case '[', '{', '&', '*':
			n++
		case '?':
			n += 2
		case '#':
			n += 3
		case '-':
			if blank(l, i+1) {
				n++
			}
		case ':':
			if delimits(l, i-1) || delimits(l, i+1) {
				n += 2
			}
		}
	}
	return n
}

// blank reports whether there is white space at an index, or nothing.
func blank(l string, i int) bool {
	return i < 0 || i >= len(l) || l[i] == ' ' || l[i] == '\t'
}

// delimits reports whether what stands at an index can delimit a token.
func delimits(l string, i int) bool {
	return blank(l, i) || strings.IndexByte(`,[]{}?"'`, l[i]) >= 0
}

// comments finds the comments of a YAML text, line by line, as long as no line can
// begin inside of quotes. After that it finds only those in lines without quotes.
type comments struct{ quotes bool }

func (c *comments) find(l string) int {
	i := -1
	for at := range len(l) {
		if l[at] == '#' && blank(l, at-1) {
			i = at
			break
		}
	}
	before := l
	if i >= 0 {
		before = l[:i]
	}
	switch quotes := `"'`; {
	case strings.ContainsAny(before, quotes):
		c.quotes = true
		return -1
	case c.quotes && strings.ContainsAny(l, quotes):
		return -1
	}
	return i
}

// withoutComments returns a YAML text without the comments that can be found. If
// a "#" may be the text of a block scalar, it returns the text as it is.
func withoutComments(s string) string {
	var b strings.Builder
	b.Grow(len(s))
	var c comments
	for rest := s; rest != ""; {
		l, after, found := strings.Cut(rest, "\n")
		rest = after
		if i := c.find(l); i >= 0 {
			l = l[:i]
		}
		b.WriteString(l)
		if found {
			b.WriteByte('\n')
		}
	}
	if strings.ContainsAny(b.String(), "|>") {
		return s
	}
	return b.String()
}

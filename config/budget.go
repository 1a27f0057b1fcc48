package config

import "strings"

// yaml.v3 allocates up to half a kilobyte per node, and a node can be as little
// as one byte of text. So nodes are counted before the tree is built.
const (
	maxNodes    = 110_000 // of one Parse
	maxFolded   = 250_000 // CIDRs of one Parse that were folded and need no node
	maxLines    = 700_000 // of one file
	maxExpanded = 300_000 // values of one file, aliases expanded
)

// MaxCIDRs is the most CIDRs that Parse accepts.
const MaxCIDRs = maxNodes + maxFolded

// budget is what remains of the limits of one Parse.
type budget struct{ nodes, folded int }

// take reports whether a YAML text fits, and returns it, without its comments if
// it fits only without them.
func (r *budget) take(s string, runs []run) (string, bool) {
	n := countNodes(s, r.nodes)
	if n > r.nodes {
		s = withoutComments(s)
		n = countNodes(s, r.nodes)
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

func (f *file) tooMuch() {
	f.errors.add(Problem{Pos: at(f.name, 1, 1), Msg: "too many values: a config may have at most 100,000"}, maxErrors)
}

// countNodes returns an upper bound of the nodes in a YAML text; it stops
// counting above the limit. Each node needs an indicator, or is a key with one.
// What looks like an indicator inside text counts as well, except in comments,
// each of which takes as much memory as three nodes.
func countNodes(s string, limit int) int {
	comma := 1
	if strings.Contains(s, "{") {
		comma = 2 // {a, b} has the values null
	}
	var c comments
	n := 1
	for l := range strings.SplitSeq(s, "\n") {
		content := c.cut(l)
		if len(content) < len(l) {
			n += 3
		}
		if n += countLine(content, comma); n > limit {
			break
		}
	}
	return n
}

func countLine(l string, comma int) int {
	n := 0
	if strings.HasPrefix(l, ".") || strings.HasPrefix(l, "%") {
		n++ // end of document, or a directive
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

// blank reports whether index i holds white space or is outside the line.
func blank(l string, i int) bool {
	return i < 0 || i >= len(l) || l[i] == ' ' || l[i] == '\t'
}

// delimits reports whether the character at index i can delimit a token.
func delimits(l string, i int) bool {
	return blank(l, i) || strings.IndexByte(`,[]{}?"'`, l[i]) >= 0
}

// comments finds the comments of a YAML text, line by line. Once a line may begin
// inside quotes, it finds only those in lines without quotes.
type comments struct{ quotes bool }

// cut returns the line without its comment.
func (c *comments) cut(l string) string {
	const quotes = `"'`
	content := l
	for i := range len(l) {
		if l[i] == '#' && blank(l, i-1) {
			content = l[:i]
			break
		}
	}
	c.quotes = c.quotes || strings.ContainsAny(content, quotes)
	if c.quotes && strings.ContainsAny(l, quotes) {
		return l
	}
	return content
}

// withoutComments returns a YAML text without the comments that can be found. If
// a "#" may be part of a block scalar, it returns the text unchanged.
func withoutComments(s string) string {
	var b strings.Builder
	b.Grow(len(s) + 1)
	var c comments
	for l := range strings.SplitSeq(s, "\n") {
		b.WriteString(c.cut(l))
		b.WriteByte('\n')
	}
	if strings.ContainsAny(b.String(), "|>") {
		return s
	}
	return b.String()
}

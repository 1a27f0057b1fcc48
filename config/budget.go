package config

import "strings"

// yaml.v3 allocates up to half a kilobyte per node, and a node can be as little as one byte of text. So nodes are
// counted before the tree is built. A CIDR is at least one node.
const (
	maxNodes = 122_000 // of one Parse
	maxLines = 700_000 // of one file
)

// countNodes returns an upper bound of the nodes in a YAML text; it stops
// counting above the limit. Each node needs an indicator, or is a key with one.
// What looks like an indicator inside text counts as well, and a comment that
// [withoutComments] leaves as two.
func countNodes(s string, limit int) int {
	weights := [256]int{',': 1, '[': 1, '{': 1, '&': 1, '*': 1, '?': 2, '#': 2}
	if strings.Contains(s, "{") {
		weights[','] = 2 // {a, b} has the values null
	}
	n := 1
	for i := 0; i < len(s) && n <= limit; i++ {
		n += weights[s[i]]
		switch s[i] {
		case '-':
			if blank(s, i+1) {
				n++
			}
		case ':':
			if delimits(s, i-1) || delimits(s, i+1) {
				n += 2
			}
		case '%':
			if i == 0 || s[i-1] == '\n' {
				n += 1000 // directives, which yaml.v3 compares pairwise
			}
		}
	}
	return n
}

// blank reports whether index i holds white space or is outside the text.
func blank(s string, i int) bool {
	return i < 0 || i >= len(s) || strings.IndexByte(" \t\n", s[i]) >= 0
}

// delimits reports whether the character at index i can delimit a token.
func delimits(s string, i int) bool {
	return blank(s, i) || strings.IndexByte(`,[]{}?"'`, s[i]) >= 0
}

package config

import (
	"strings"

	"gopkg.in/yaml.v3"
)

// yaml.v3 takes a microsecond and 400 bytes for each entry of a long list. So
// lines that contain only a CIDR as an entry of a block list are read here, and
// yaml.v3 sees just the first and the last one of each run of them, with empty
// lines in between. Empty lines and comments do not end a run. If yaml.v3 finds
// that the first one is an entry of a block list, the lines in between can only
// be further entries of that list, because their dashes are in the same column.
// If not, the whole text is parsed again.

// run is a block of lines with one CIDR each and the dash in the same column.
type run struct {
	cidrs      []CIDR
	from       int    // index of the first of them in the CIDRs of all runs
	first      string // the first one as written
	dash       int    // column of the dashes, from 0
	start, end int    // the bytes between the first line and the last one
}

// folds maps the node of a run's first CIDR to the CIDRs of the run.
type folds map[*yaml.Node][]CIDR

// omitted returns the CIDRs that were left out after a node.
func (f folds) omitted(n *yaml.Node) []CIDR {
	all := f[n]
	if len(all) == 0 {
		return nil
	}
	return all[1 : len(all)-1]
}

// minRun is the number of CIDRs from which on a run is folded.
const minRun = 4

// fold returns the text without the inner lines of its runs, and the runs themselves.
func (t *text) fold() (string, []run) {
	var runs []run
	var cur run
	var all []CIDR
	end := func() {
		if cur.cidrs = all[cur.from:]; len(cur.cidrs) >= minRun {
			runs = append(runs, cur)
		}
		cur = run{from: len(all)}
	}
	for rest, number := t.s, 1; rest != ""; number++ {
		offset := len(t.s) - len(rest)
		var l string
		l, rest, _ = strings.Cut(rest, "\n")
		if body := strings.TrimLeft(l, " "); body == "" || body[0] == '#' {
			continue
		}
		dash, col, value := entry(l)
		p, ok := strictCIDR(value)
		if !ok || dash != cur.dash {
			end()
		}
		if !ok || len(all) > maxFolded {
			continue
		}
		if len(all) == cur.from {
			cur = run{from: len(all), first: value, dash: dash, start: len(t.s) - len(rest)}
		}
		if all == nil {
			all = make([]CIDR, 0, min(strings.Count(t.s, "\n"), maxFolded)+1)
		}
		all = append(all, CIDR{Prefix: p, Pos: at(t.name, number, col)})
		cur.end = offset
	}
	end()
	return cut(t.s, runs), runs
}

// entry reads a line such as `  - "10.0.0.0/8" # pods`: the column of the dash
// (from 0), the column of the value (from 1), and the value. For any other line
// the value is "".
func entry(l string) (dash, col int, value string) {
	body := strings.TrimLeft(l, " ")
	rest, ok := strings.CutPrefix(body, "- ")
	if !ok {
		return 0, 0, ""
	}
	rest = strings.TrimLeft(rest, " ")
	value, _, _ = strings.Cut(rest, " #")
	value = strings.TrimRight(value, " ")
	if n := len(value); n > 2 && (value[0] == '"' || value[0] == '\'') && value[n-1] == value[0] {
		value = value[1 : n-1]
	}
	return len(l) - len(body), len(l) - len(rest) + 1, value
}

// cut returns s with the inner lines of each run reduced to line feeds.
func cut(s string, runs []run) string {
	var b strings.Builder
	done := 0
	for _, r := range runs {
		b.WriteString(s[done:r.start])
		b.WriteString(strings.Repeat("\n", strings.Count(s[r.start:r.end], "\n")))
		done = r.end
	}
	b.WriteString(s[done:])
	return b.String()
}

// unfold finds the first entry of every run in a tree. It reports false if any is
// missing.
func unfold(n *yaml.Node, runs []run) (folds, bool) {
	byLine := make(map[int]run, len(runs))
	for _, r := range runs {
		byLine[int(r.cidrs[0].Pos.Line)] = r
	}
	lists := make(folds, len(runs))
	var walk func(n *yaml.Node)
	walk = func(n *yaml.Node) {
		for _, c := range n.Content {
			r, ok := byLine[c.Line]
			if ok && n.Kind == yaml.SequenceNode && n.Style&yaml.FlowStyle == 0 &&
				c.Kind == yaml.ScalarNode && c.Column == int(r.cidrs[0].Pos.Col) && c.Value == r.first {
				lists[c] = r.cidrs
			}
			walk(c)
		}
	}
	if len(runs) > 0 {
		walk(n)
	}
	return lists, len(lists) == len(runs)
}

// Plot draws the plots of cmd/bench/results.txt, which make bench printed: what a new connection costs, and how long a change takes, over the number of CIDRs. Both axes are
// logarithmic. The colors can be read on a light and on a dark page: an image does not know on which it is.
//
//	plot results.txt DIRECTORY
package main

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: plot results.txt DIRECTORY")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "plot:", err)
		os.Exit(1)
	}
}

func run(table, dir string) error {
	text, err := os.ReadFile(table)
	if err != nil {
		return err
	}
	for _, p := range plots {
		svg, err := p.draw(string(text))
		if err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		if err := os.WriteFile(filepath.Join(dir, p.name), []byte(svg), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// A plot shows rows of one section of the table.
type plot struct {
	name, title, section, unit string
	series                     []series
}

// A series is the rows that measure the same for different numbers of CIDRs: in the column "what", or
// in the column "against" if it has that name.
type series struct{ name, what, against, color string }

var plots = []plot{
	{"connection.svg", "One new connection through the node", "one new connection through the node", "µs", []series{
		{"masqueraded by an iptables chain", "masqueraded, the iptables chain", "", "#d9730d"},
		{"exempt by an iptables chain", "exempt, the iptables chain", "", "#b08800"},
		{"masqueraded by nft-masq-agent", "masqueraded", "", "#2f81f7"},
		{"exempt by nft-masq-agent", "exempt", "", "#3fa66b"},
	}},
	{"change.svg", "All rules written anew", "full apply", "ms", []series{
		{"iptables-nft-restore", "from a ruleset", "iptables-nft-restore", "#d9730d"},
		{"nft -f", "from a ruleset", "nft -f", "#b08800"},
		{"nft-masq-agent", "from a ruleset", "", "#2f81f7"},
	}},
}

// A point is a number of CIDRs and a median.
type point struct{ x, y float64 }

// points returns the values of a series in a unit, in the order of the table.
func (p plot) points(text string, s series) (all []point, err error) {
	section := ""
	for line := range strings.Lines(text) {
		cells := strings.Split(strings.Trim(line, "| \n"), " | ")
		if title, ok := strings.CutPrefix(strings.Trim(line, "| \n"), "**"); ok {
			section, _, _ = strings.Cut(title, "**")
		}
		if section != p.section || len(cells) < 5 || cells[1] != s.what || s.against != "" && cells[3] != s.against {
			continue
		}
		value := cells[2]
		if s.against != "" {
			value = cells[4]
		}
		fields := strings.Fields(value)
		x, xErr := strconv.ParseFloat(strings.ReplaceAll(cells[0], ",", ""), 64)
		y, yErr := strconv.ParseFloat(fields[0], 64)
		if xErr != nil || yErr != nil || fields[1] != p.unit {
			return nil, fmt.Errorf("not numbers in %s: %s", p.unit, line)
		}
		if len(all) == 0 || all[len(all)-1].x != x { // a value may be compared with several others
			all = append(all, point{x, y})
		}
	}
	if len(all) < 3 {
		return nil, fmt.Errorf("%d rows of %q", len(all), s.name)
	}
	return all, nil
}

// Of the drawing, in pixels. Labels of the series are on the right.
const (
	width, height             = 800.0, 330.0
	left, right, top, bottom  = 70.0, 500.0, 50.0, 285.0
	labelDistance, firstLabel = 22.0, 70.0
)

// draw returns the plot as an SVG.
func (p plot) draw(text string) (string, error) {
	all := make([][]point, len(p.series))
	least, most := point{math.Inf(1), math.Inf(1)}, point{}
	for i, s := range p.series {
		var err error
		if all[i], err = p.points(text, s); err != nil {
			return "", err
		}
		for _, at := range all[i] {
			least = point{min(least.x, at.x), min(least.y, at.y)}
			most = point{max(most.x, at.x), max(most.y, at.y)}
		}
	}
	least.y, most.y = math.Pow(10, math.Floor(math.Log10(least.y))), math.Pow(10, math.Ceil(math.Log10(most.y)))
	scale := func(v, from, to, low, high float64) float64 {
		return low + (high-low)*math.Log(v/from)/math.Log(to/from)
	}
	x := func(v float64) float64 { return scale(v, least.x, most.x, left, right) }
	y := func(v float64) float64 { return scale(v, least.y, most.y, bottom, top) }

	var out strings.Builder
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %g %g" role="img" aria-label="%s, in %s">
<style>text { font: 13px sans-serif; fill: #6e7781 } .title { font-size: 15px }
line { stroke: #8c959f; stroke-opacity: .4 }</style>
<text class="title" x="%g" y="24">%s, in %s, over the number of CIDRs</text>
`, width, height, p.title, p.unit, left, p.title, p.unit)
	for v := least.y; v <= most.y*1.001; v *= 10 {
		fmt.Fprintf(&out, "<line x1=\"%g\" x2=\"%g\" y1=\"%.1f\" y2=\"%.1f\"/>\n", left, right, y(v), y(v))
		fmt.Fprintf(&out, "<text x=\"%g\" y=\"%.1f\" text-anchor=\"end\">%g</text>\n", left-8, y(v)+4, v)
	}
	for v := least.x; v <= most.x*1.001; v *= 10 {
		fmt.Fprintf(&out, "<text x=\"%.1f\" y=\"%g\" text-anchor=\"middle\">%.0f</text>\n", x(v), bottom+22, v)
	}
	for i, s := range p.series {
		var path strings.Builder
		for _, at := range all[i] {
			fmt.Fprintf(&path, "%.1f,%.1f ", x(at.x), y(at.y))
			fmt.Fprintf(&out, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"/>\n", x(at.x), y(at.y), s.color)
		}
		fmt.Fprintf(&out, "<polyline points=\"%s\" fill=\"none\" stroke=\"%s\" stroke-width=\"2\"/>\n",
			strings.TrimSpace(path.String()), s.color)
		label := firstLabel + float64(i)*labelDistance
		fmt.Fprintf(&out, "<circle cx=\"%g\" cy=\"%g\" r=\"5\" fill=\"%s\"/>\n<text x=\"%g\" y=\"%g\">%s</text>\n",
			right+30, label-4, s.color, right+42, label, s.name)
	}
	out.WriteString("</svg>\n")
	return out.String(), nil
}

package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
)

// A report is the output.
type report struct {
	Date       string
	Kernel     string
	Machine    string
	Processors int
	Nft        string
	Iptables   string
	Agent      string
	Rows       []row
}

// A row is a measurement, alone or compared with another one. Its target is a
// bound of the ratio if compared, otherwise of the value.
type row struct {
	Group   string
	CIDRs   int // 0: the default config
	What    string
	Unit    string
	Ours    spread
	Against string
	Theirs  *spread
	Ratio   *spread
	Rounds  int
	Target  float64
	Bounded bool // there is a target
	Met     bool // by the worse quartile, or by the median
}

// units returns the factors from a series' unit.
func units() map[string]float64 {
	return map[string]float64{"ms": 1e3, "µs": 1e6, "MB": 1, "%": 100, "": 1}
}

// newRow returns a row with a single measurement.
func newRow(group string, cidrs int, what, unit string, ours series) row {
	return row{
		Group: group, CIDRs: cidrs, What: what, Unit: unit,
		Ours: ours.times(units()[unit]).spread(), Rounds: len(ours),
	}
}

// against adds the other measurement of each pair.
func (r row) against(name string, ours, theirs series) row {
	other, ratio := theirs.times(units()[r.Unit]).spread(), ours.over(theirs).spread()
	r.Against, r.Theirs, r.Ratio = name, &other, &ratio
	return r
}

// target sets the bound that the worse quartile must meet.
func (r row) target(bound float64) row {
	worse := r.Ours.Q3
	if r.Ratio != nil {
		worse = r.Ratio.Q3
	}
	r.Target, r.Bounded, r.Met = bound, true, worse <= bound
	return r
}

// targetOfMedian sets the bound that the median must meet: if it is close to 1, or of a small difference,
// the worse quartile depends more on the machine.
func (r row) targetOfMedian(bound float64) row {
	of := r.Ours
	if r.Ratio != nil {
		of = *r.Ratio
	}
	r.Target, r.Bounded, r.Met = bound, true, of.Median <= bound
	return r
}

func (r report) head() string {
	return fmt.Sprintf("%s · Linux %s · %d × %s · %s · %s · %s",
		r.Date, r.Kernel, r.Processors, r.Machine, r.Agent, r.Nft, r.Iptables)
}

// legend explains the table.
const legend = "Median and, in brackets, the quartiles; a target is met if the worse quartile meets it, with " +
	"dropInvalid, portsPerPod and for other programs if the median does."

// columns returns the column headers, and cells the contents of a row.
func columns() []string {
	return []string{"CIDRs", "what", "value", "against", "value", "ratio", "target"}
}

func (r row) cells() []string {
	return []string{
		r.size(), r.What, r.Ours.text(r.Unit), r.Against,
		r.Theirs.text(r.Unit), r.Ratio.text(""), r.verdict(),
	}
}

// write prints the table, in Markdown.
func (r report) write(w io.Writer) error {
	var b strings.Builder
	line := func(cells []string) { fmt.Fprintf(&b, "| %s |\n", strings.Join(cells, " | ")) }
	fmt.Fprintf(&b, "%s\n\n%s\n\n", r.head(), legend)
	line(columns())
	line(slices.Repeat([]string{"---"}, len(columns())))
	group := ""
	for _, row := range r.Rows {
		if row.Group != group {
			group = row.Group
			line(append([]string{"", "**" + group + "**"}, make([]string, len(columns())-2)...))
		}
		line(row.cells())
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (r row) size() string {
	if r.CIDRs == defaultSize {
		return "default"
	}
	return grouped(r.CIDRs)
}

// grouped writes a number with commas.
func grouped(n int) string {
	if n < 1000 {
		return fmt.Sprint(n)
	}
	return fmt.Sprintf("%s,%03d", grouped(n/1000), n%1000)
}

func (r row) verdict() string {
	if !r.Bounded {
		return ""
	}
	unit := ""
	if r.Ratio == nil {
		unit = r.Unit
	}
	word := "missed"
	if r.Met {
		word = "met"
	}
	return fmt.Sprintf("≤ %s %s", withUnit(fmt.Sprint(r.Target), unit), word)
}

// text returns the median, with the quartiles if there is a spread.
func (s *spread) text(unit string) string {
	if s == nil {
		return ""
	}
	if s.Q1 == s.Q3 {
		return withUnit(figures(s.Median), unit)
	}
	return fmt.Sprintf("%s [%s %s]", withUnit(figures(s.Median), unit), figures(s.Q1), figures(s.Q3))
}

func withUnit(value, unit string) string {
	if unit == "" {
		return value
	}
	return value + " " + unit
}

// figures formats three significant figures, with at most two decimals below 1.
func figures(v float64) string {
	switch a := math.Abs(v); {
	case a >= 100 || a == math.Trunc(a):
		return fmt.Sprintf("%.0f", v)
	case a >= 10:
		return fmt.Sprintf("%.1f", v)
	case a >= 0.05:
		return fmt.Sprintf("%.2f", v)
	default:
		return fmt.Sprintf("%.4f", v)
	}
}

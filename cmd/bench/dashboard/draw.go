package main

import (
	"encoding/json"
	"fmt"
	"html"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
)

// A dashboard is what the picture needs of Grafana's file.
type dashboard struct {
	Panels []panel
}

type panel struct {
	Title, Type string
	GridPos     struct{ X, Y, W, H int }
	Targets     []target
	FieldConfig struct {
		Defaults struct {
			Unit       string
			Thresholds struct {
				Steps []struct {
					Color string
					Value *float64
				}
			}
		}
	}
	found []series
}

type target struct{ Expr, LegendFormat string }

// A series is one of Prometheus's: pairs of seconds since 1970 and a number as text.
type series struct {
	Metric map[string]string
	Values [][2]any
	name   string
}

// rows of the file's grid that are drawn; below them are panels of features that the run does not use.
const rows = 38

func read(file string) (d dashboard, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return d, err
	}
	err = json.Unmarshal(text, &d)
	d.Panels = slices.DeleteFunc(d.Panels, func(p panel) bool { return p.GridPos.Y >= rows })
	return d, err
}

// name fills labels into the format of a legend.
func (t target) name(labels map[string]string) string {
	name := t.LegendFormat
	for label, value := range labels {
		name = strings.ReplaceAll(name, "{{"+label+"}}", value)
	}
	return name
}

// points returns seconds and values.
func (s series) points() (all [][2]float64) {
	for _, v := range s.Values {
		at, _ := v[0].(float64)
		text, _ := v[1].(string)
		if y, err := strconv.ParseFloat(text, 64); err == nil && !math.IsNaN(y) {
			all = append(all, [2]float64{at, y})
		}
	}
	return all
}

func (s series) most() (most float64) {
	for _, at := range s.points() {
		most = max(most, at[1])
	}
	return most
}

// Pixels of a unit of the grid. Colors can be read on a light and on a dark page.
const width, height = 40.0, 22.0

var (
	colors = []string{"#2f81f7", "#d9730d", "#3fa66b", "#b08800", "#8e6bd1", "#cf4a5f"}
	named  = map[string]string{"green": "#3fa66b", "red": "#cf4a5f", "orange": "#d9730d", "blue": "#2f81f7"}
)

func (d dashboard) draw() string {
	var out strings.Builder
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %g %g" role="img" aria-label="The dashboard">
<style>text { font: 11px sans-serif; fill: #6e7781 } .title { font-weight: bold } .stat { font-size: 30px }
rect { fill: none; stroke: #8c959f; stroke-opacity: .5 } line { stroke: #8c959f; stroke-opacity: .4 }</style>
`, 24*width, rows*height)
	begin, end := math.Inf(1), math.Inf(-1)
	for _, p := range d.Panels {
		for _, s := range p.found {
			for _, at := range s.points() {
				begin, end = min(begin, at[0]), max(end, at[0])
			}
		}
	}
	for _, p := range d.Panels {
		fmt.Fprintf(&out, "<g transform=\"translate(%g %g)\">\n", float64(p.GridPos.X)*width, float64(p.GridPos.Y)*height)
		w, h := float64(p.GridPos.W)*width, float64(p.GridPos.H)*height
		fmt.Fprintf(&out, "<rect x=\"3\" y=\"3\" width=\"%g\" height=\"%g\" rx=\"3\"/>\n", w-6, h-6)
		text(&out, 12, 20, "title", "", p.Title)
		switch {
		case len(p.found) == 0:
			text(&out, 12, h/2, "", "", "No data")
		case p.Type == "stat":
			p.stat(&out, h)
		case p.Type == "table":
			p.table(&out)
		default:
			p.timeseries(&out, w, h, begin, end)
		}
		out.WriteString("</g>\n")
	}
	out.WriteString("</svg>\n")
	return out.String()
}

func text(out *strings.Builder, x, y float64, class, color, what string) {
	style := ""
	if color != "" {
		style = fmt.Sprintf(` style="fill: %s"`, color)
	}
	fmt.Fprintf(out, "<text x=\"%.0f\" y=\"%.0f\" class=\"%s\"%s>%s</text>\n", x, y, class, style, html.EscapeString(what))
}

// stat writes the last value in the color of its threshold.
func (p panel) stat(out *strings.Builder, h float64) {
	all := p.found[0].points()
	last, color := all[len(all)-1][1], ""
	for _, step := range p.FieldConfig.Defaults.Thresholds.Steps {
		if step.Value == nil || last >= *step.Value {
			color = named[step.Color]
		}
	}
	text(out, 12, h-22, "stat", color, fmt.Sprintf("%g", last))
}

// table writes the labels of the series that there are at the end.
func (p panel) table(out *strings.Builder) {
	end := 0.0
	for _, s := range p.found {
		all := s.points()
		end = max(end, all[len(all)-1][0])
	}
	y := 42.0
	for i, column := range []string{"node", "hash", "mode"} {
		text(out, 12+float64(i)*130, y, "title", "", column)
	}
	for _, s := range p.found {
		if all := s.points(); all[len(all)-1][0] < end {
			continue
		}
		y += 20
		for i, column := range []string{"node", "hash", "mode"} {
			text(out, 12+float64(i)*130, y, "", "", s.Metric[column])
		}
	}
}

// timeseries draws lines over the seconds of the run, and a legend.
func (p panel) timeseries(out *strings.Builder, w, h, begin, end float64) {
	most := 0.0
	for _, s := range p.found {
		most = max(most, s.most())
	}
	unit := math.Pow(10, math.Floor(math.Log10(max(most, 1e-9))))
	most = math.Ceil(max(most, 1e-9)/unit) * unit
	left, right, top, bottom := 50.0, w-150, 34.0, h-26
	for i := range 3 {
		y := bottom - float64(i)/2*(bottom-top)
		fmt.Fprintf(out, "<line x1=\"%g\" x2=\"%g\" y1=\"%.1f\" y2=\"%.1f\"/>\n", left, right, y, y)
		text(out, 10, y+4, "", "", p.value(most*float64(i)/2))
	}
	text(out, left, h-10, "", "", "0 s")
	text(out, right-24, h-10, "", "", fmt.Sprintf("%.0f s", end-begin))
	shown := p.found
	if len(shown) > 4 { // more are the labels of a counter, most of which never counted
		shown = slices.DeleteFunc(slices.Clone(shown), func(s series) bool { return s.most() == 0 })
	}
	for i, s := range shown {
		color, last := colors[i%len(colors)], math.Inf(-1)
		var path strings.Builder
		for _, at := range s.points() {
			to := "L"
			if at[0] > last+1 {
				to = "M" // it did not exist in between
			}
			last = at[0]
			fmt.Fprintf(&path, "%s%.1f %.1f", to, left+(at[0]-begin)/(end-begin)*(right-left), bottom-at[1]/most*(bottom-top))
		}
		fmt.Fprintf(out, "<path d=\"%s\" fill=\"none\" stroke=\"%s\" stroke-width=\"1.5\"/>\n", path.String(), color)
		text(out, right+12, top+6+float64(i)*16, "", color, s.name)
	}
}

// value formats a number in the unit of the panel.
func (p panel) value(v float64) string {
	switch p.FieldConfig.Defaults.Unit {
	case "s":
		return fmt.Sprintf("%.3g ms", v*1000)
	case "bytes":
		return fmt.Sprintf("%.3g MiB", v/(1<<20))
	case "cps", "ops", "pps":
		return fmt.Sprintf("%.3g/s", v)
	}
	return fmt.Sprintf("%.3g", v)
}

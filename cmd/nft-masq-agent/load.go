package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// loaded is what the files say, and what becomes of it.
type loaded struct {
	files    []string // none: the defaults hold
	config   config.Config
	warnings []config.Problem
	ruleset  nft.Ruleset
}

// load reads, parses and compiles the config. What is wrong with the files is
// an error of type [config.Problems].
func (o options) load() (loaded, error) {
	sources, err := config.Read(o.root + o.configPath)
	if err != nil {
		return loaded{}, o.withoutRoot(err)
	}
	var l loaded
	for i := range sources {
		sources[i].Name = o.trimRoot(sources[i].Name)
		l.files = append(l.files, sources[i].Name)
	}
	l.config, l.warnings, err = config.Parse(o.defaults(), sources...)
	if err != nil {
		return l, err
	}
	l.ruleset = nft.Compile(l.config, o.nftOptions())
	return l, l.ruleset.CheckChains()
}

func (o options) trimRoot(name string) string {
	if o.root == "" {
		return name
	}
	return strings.TrimPrefix(name, o.root)
}

// withoutRoot names files in problems as the agent whose files they are does.
func (o options) withoutRoot(err error) error {
	var problems config.Problems
	if errors.As(err, &problems) {
		for i := range problems {
			problems[i].Pos.File = o.trimRoot(problems[i].Pos.File)
		}
	}
	return err
}

// refuse prints what is wrong with the files, each problem on a line that
// begins with its place and, in a terminal, with the line of the file below.
func refuse(e environment, err error) (int, error) {
	var problems config.Problems
	if !errors.As(err, &problems) {
		return exitFailed, err
	}
	for _, p := range problems {
		printProblem(e, "", p)
	}
	return exitFailed, nil
}

func printProblem(e environment, severity string, p config.Problem) {
	_, _ = fmt.Fprintf(e.stderr, "%s%v\n", severity, p)
	if caret := p.Caret(); e.terminal && caret != "" {
		_, _ = fmt.Fprintln(e.stderr, caret)
	}
}

// warn prints the warnings of a file beside the answer.
func (l loaded) warn(e environment) {
	for _, w := range l.warnings {
		printProblem(e, "warning: ", w)
	}
}

// writeJSON prints an answer for programs.
func writeJSON(w io.Writer, v any) error {
	text, err := encodeJSON(v)
	if err != nil {
		return err
	}
	return write(w, text)
}

func encodeJSON(v any) (string, error) {
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(v); err != nil {
		return "", fmt.Errorf("output: %w", err)
	}
	return b.String(), nil
}

// Formats of an answer.
const (
	outputText = "text"
	outputJSON = "json"
)

// A keyedList is a list of a policy under the key of the file that fills it.
type keyedList struct {
	nft.List
	key   string
	set   string // the name of the set without family
	asks  string // for the source or for the destination
	means string
}

// keyedLists gives the lists of a family in the order in which they are asked.
func keyedLists(f nft.FamilyPolicy) []keyedList {
	return []keyedList{
		{f.MasqSrc, "masqueradeSrcCIDRs", "masq-src", "source", "the only sources that are masqueraded"},
		{f.NonMasqSrc, "nonMasqueradeSrcCIDRs", "non-masq-src", "source", "sources that keep their own address"},
		{f.Force, "forceMasqueradeCIDRs", "force-masq", "destination", "destinations that always see the node's address"},
		{f.NonMasq, "nonMasqueradeCIDRs", "non-masq", "destination", "destinations that see the pod's own address"},
	}
}

func familyName(ipv6 bool) string {
	if ipv6 {
		return "IPv6"
	}
	return "IPv4"
}

// place says where a CIDR comes from.
func place(c config.CIDR) string {
	switch {
	case c.Pos != config.Position{}:
		return c.Pos.String()
	case c.Prefix == linkLocalIPv4:
		return "link-local, masqLinkLocal is false"
	case c.Prefix == linkLocalIPv6:
		return "link-local, masqLinkLocalIPv6 is false"
	}
	return "built-in default"
}

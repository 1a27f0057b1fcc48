package config

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"gopkg.in/yaml.v3"
)

// bool reads what is a boolean to the older agents, including yes and on, which are booleans in YAML 1.1. In quotes
// these are texts, but yaml.v3 decodes them all the same.
func (f *file) bool(key string, n *yaml.Node, value *bool) bool {
	valid := n.Kind == yaml.ScalarNode && (n.Style == 0 || n.Tag == "!!bool")
	switch {
	case valid && n.Decode(value) == nil:
		return true
	case n.Kind == yaml.ScalarNode && n.Decode(value) == nil:
		return f.wrong(Error, key, n, fmt.Sprintf("want true or false: write %t without quotes or tag", *value))
	}
	return f.wrong(Error, key, n, "want true or false")
}

// decimal reads a decimal integer; 010 would be another one in YAML 1.1.
func decimal(n *yaml.Node) (number int, ok bool) {
	number, err := strconv.Atoi(n.Value)
	return number, err == nil && n.Tag == "!!int" && n.Value == strconv.Itoa(number)
}

func (f *file) int(key string, n *yaml.Node, value *int) (valid bool) {
	*value, valid = decimal(n)
	return valid || f.wrong(Error, key, n, "want a whole number in decimal digits")
}

func (f *file) podPorts(key string, n *yaml.Node, value *PodPorts) bool {
	size, valid := decimal(n)
	*value = PodPorts(size)
	valid = valid && (size == 0 || size >= minPortsPerPod && size <= maxPortsPerPod)
	return valid || f.wrong(Error, key, n, fmt.Sprintf("want 0 (off), or %d to %d", minPortsPerPod, maxPortsPerPod))
}

// ports reads port ranges; one port may be a number.
func (f *file) ports(key string, n *yaml.Node, value *string) bool {
	*value = n.Value
	_, err := ParsePorts(n.Value)
	valid := n.Kind == yaml.ScalarNode && err == nil
	return valid || f.wrong(Error, key, n, `want port ranges such as "1024-29999,32768-65535"`)
}

func (f *file) staleConnections(key string, n *yaml.Node, value *Stale) bool {
	stale, valid := map[string]Stale{"keep": StaleKeep, "udp": StaleUDP, "all": StaleAll}[strings.ToLower(n.Value)]
	*value = stale
	return valid || f.wrong(Error, key, n, "want keep, udp or all")
}

// duration reads a Go duration. The older agents accept zero or less, and then
// never pause.
func (f *file) duration(key string, n *yaml.Node, value *time.Duration) bool {
	d, err := time.ParseDuration(n.Value)
	seconds, _ := time.ParseDuration(n.Value + "s")
	*value = min(max(d, shortestInterval), longestInterval)
	switch {
	case isNull(n):
		return f.wrong(Error, key, n, `write one such as "60s", or remove the key`)
	case err == nil && !isNumber(n) && d <= 0: // also "0"
		f.wrong(Mistake, key, n, `want more than zero, such as "60s"`)
		return !f.joined
	case err == nil && !isNumber(n):
		if *value != d {
			f.report(Warning, "interval", n, "%s is %s, outside 1s to 24h: %s is used", key, describe(n), *value)
		}
		return true
	case seconds > 0:
		return f.wrong(Error, key, n, fmt.Sprintf("without a unit: write %q", n.Value+"s"))
	}
	return f.wrong(Error, key, n, `want a duration such as "60s"; the units are ms, s, m, h`)
}

// wrong reports a wrong value, in a directory only as a warning if the key is
// ignored there, and returns false.
func (f *file) wrong(level Level, key string, n *yaml.Node, want string) bool {
	if f.joined && (key == keyResyncInterval || key == keyCIDRLimit) {
		level = Warning
		want += "; this is ignored in a directory"
	}
	f.report(level, "wrongValue", n, "%s is %s, %s", key, describe(n), want)
	return false
}

func isNumber(n *yaml.Node) bool { return n.Tag == "!!int" || n.Tag == "!!float" }

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }

// kind names the type of a value, without its content.
func kind(n *yaml.Node) string {
	switch {
	case n.Kind == yaml.SequenceNode:
		return "a list"
	case n.Kind == yaml.MappingNode && len(n.Content) > 0 && n.Content[0].Kind == yaml.MappingNode:
		return "an unrendered {{ }}" // in YAML, a mapping whose key is a mapping
	case n.Kind == yaml.MappingNode:
		return "a mapping"
	case isNumber(n):
		return "a number"
	}
	return "a text"
}

// describe names the type of a value, and quotes a short one.
func describe(n *yaml.Node) string {
	switch {
	case n.Kind != yaml.ScalarNode, !quotable(n.Value):
		return kind(n)
	case isNumber(n):
		return "the number " + n.Value
	case n.Tag == "!!bool":
		return n.Value
	case n.Tag == "!!null":
		return "null"
	case placeholder.MatchString(n.Value):
		return "the unrendered text " + quote(n.Value)
	}
	return "the text " + quote(n.Value)
}

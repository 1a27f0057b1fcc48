package config

import (
	"cmp"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"gopkg.in/yaml.v3"
)

// Parse reads all sources and merges them: lists are concatenated in source
// order, booleans are ORed, the shortest interval, the smallest limit, the smallest
// portsPerPod and the staleConnections that deletes most apply. Keys that no source sets keep their
// defaults.
//
// The sources are accepted if the problems have no [Problems.Faults]. With
// mistakes alone, the Config is what the older agents derive from the sources, and
// the keys that only this agent has. With an error it is zero.
func Parse(d Defaults, sources ...Source) (Config, Problems) {
	p := &parser{defaults: d, config: Default(d), set: map[string]Position{}, nodes: maxNodes}
	size := 0
	for _, s := range sources {
		size += len(s.Data)
		if size > maxSize {
			return Config{}, Problems{tooLarge(Printable(s.Name), len(sources) > 1)}
		}
		p.joined = p.joined || s.Joined
		p.read(s)
	}
	for i := range table {
		p.merge(&table[i])
	}
	p.config.given = p.set
	p.checkDirectory(sources)
	p.checkLists()
	p.checkNeedsPods(KeyEnforceNonMasquerade, p.config.Enforce, "turn off masquerading for")
	p.checkNeedsPods(KeyDropInvalid, p.config.DropInvalid, "drop packets of")
	p.checkPortsPerPod()
	if p.found[Error] > 0 {
		p.config = Config{}
	}
	return p.config, p.sorted()
}

// A parser is the state of one Parse.
type parser struct {
	report
	files  []*file
	joined bool // the files are those of a directory
	nodes  int  // left for the remaining files

	defaults Defaults
	config   Config
	set      map[string]Position // of the values that apply, by key; not of defaults
}

// merge reads the values of a key in all files into its field of the config.
func (p *parser) merge(row *Row) {
	if row.Key == keyLinkLocal {
		p.linkLocal(row)
		return
	}
	switch field := row.in(&p.config).(type) {
	case *[]CIDR, *[]Interface, *[]SNATRule:
		p.mergeLists(row)
	case *bool:
		value := *field != row.inverse // the value of the key, which may be the inverse of the field
		scalar(p, row, &value, (*file).bool, yes)
		*field = value != row.inverse
	case **bool:
		value := false
		scalar(p, row, &value, (*file).bool, yes)
		if _, set := p.set[row.Key]; set {
			*field = &value
		}
	case **[]PortRange:
		value := ""
		scalar(p, row, &value, (*file).ports, func(string, string) bool { return false })
		if _, set := p.set[row.Key]; set {
			ranges, _ := ParsePorts(value)
			*field = &ranges
		}
	case *PodPorts:
		smaller := func(a, b PodPorts) bool { return a > 0 && (b == 0 || a < b) }
		scalar(p, row, field, (*file).podPorts, smaller)
	case *time.Duration:
		scalar(p, row, field, (*file).duration, cmp.Less[time.Duration])
	case *int:
		scalar(p, row, field, (*file).int, cmp.Less[int])
	case *Stale:
		wider := func(a, b Stale) bool { return a == StaleAll || b == StaleKeep }
		scalar(p, row, field, (*file).staleConnections, wider)
	}
}

// mergeLists is the part of merge for lists, which are concatenated.
func (p *parser) mergeLists(row *Row) {
	switch field := row.in(&p.config).(type) {
	case *[]CIDR:
		var list []CIDR
		for _, f := range p.files {
			items := f.list(row)
			list = slices.Grow(list, len(items))
			for _, item := range items {
				list = append(list, CIDR{f.entry(row, item), f.position(item)})
			}
		}
		if _, set := p.set[row.Key]; set {
			*field = list
		}
	case *[]Interface:
		for _, f := range p.files {
			for _, item := range f.list(row) {
				f.entry(row, item)
				*field = append(*field, Interface{target(item).Value, f.position(item)})
			}
		}
		if n := len(*field); n > maxInterfaces {
			p.add(Error, "tooManyEntries", p.set[row.Key], "%s has %d names, at most %d are possible: use a prefix such as %q",
				row.Key, n, maxInterfaces, "veth*")
		}
	case *[]SNATRule:
		for _, f := range p.files {
			*field = append(*field, f.snatRules(row)...)
		}
		if n := len(*field); n > maxSNATRules {
			p.add(Error, "tooManyEntries", (*field)[maxSNATRules].Pos,
				"%s has %d entries, at most %d are possible: each is a rule", row.Key, n, maxSNATRules)
		}
	}
}

// yes makes true win over false.
func yes(value, _ bool) bool { return value }

// The names of non-masquerade-daemon, ip-masq-agent's predecessor.
const (
	predecessorFile  = "non-masquerade-daemon"
	predecessorChain = "NON-MASQUERADE-DAEMON"
)

// ofPredecessor reports whether the files are those of non-masquerade-daemon.
func (p *parser) ofPredecessor() bool {
	return p.defaults.Chain == predecessorChain ||
		slices.ContainsFunc(p.files, func(f *file) bool { return filepath.Base(f.name) == predecessorFile })
}

// linkLocal reads the key of non-masquerade-daemon, which ip-masq-agent ignores.
func (p *parser) linkLocal(row *Row) {
	exempt := false
	scalar(p, row, &exempt, (*file).bool, yes)
	position, given := p.set[row.Key]
	inverse, both := p.set[KeyMasqLinkLocal]
	switch {
	case !given:
	case both:
		p.add(Mistake, "conflictingKeys", position, "%s is the inverse of %s, which is set at %s: remove one of them",
			keyLinkLocal, KeyMasqLinkLocal, inverse)
	case p.ofPredecessor():
		p.config.MasqLinkLocal = !exempt
		p.add(Warning, "deprecatedKey", position, "%s is deprecated: write its inverse, %s: %t",
			keyLinkLocal, KeyMasqLinkLocal, !exempt)
	case exempt:
		p.add(Warning, "deprecatedKey", position, "%s is ignored, as by ip-masq-agent: remove it, or write %s: false",
			keyLinkLocal, KeyMasqLinkLocal)
	default:
		p.add(Mistake, "ignoredKey", position, "%s: false masquerades link-local destinations with non-masquerade-daemon, "+
			"but ip-masq-agent ignores it, and exempts them: write %s: true or %[2]s: false", keyLinkLocal, KeyMasqLinkLocal)
	}
}

// scalar reads the value of a key like encoding/json: all values in a file must be valid, the last one applies, and
// null leaves what is there, except for a duration. Of several files, the value applies that wins over the others.
func scalar[T comparable](
	p *parser, row *Row, field *T, read func(*file, string, *yaml.Node, *T) bool, wins func(a, b T) bool,
) {
	for _, f := range p.files {
		var value T
		var place *yaml.Node
		for _, s := range f.settings {
			decoded := !isNull(s.value) || row.Key == keyResyncInterval
			if s.row == row && decoded && read(f, row.Key, s.value, &value) {
				place = s.value
			}
		}
		_, given := p.set[row.Key]
		if place != nil && (!given || value != *field && wins(value, *field)) {
			*field = value
			p.set[row.Key] = f.position(place)
		}
	}
}

// checkDirectory warns if nothing in a directory is read, and if ip-masq-agent-v2 would read it otherwise: for that
// there is no default list once there is a file whose name begins with ip-masq.
func (p *parser) checkDirectory(sources []Source) {
	read := slices.ContainsFunc(sources, func(s Source) bool { return !s.Ignored })
	if p.joined && !read {
		p.add(Warning, "nothingRead", Position{File: filepath.Dir(p.files[0].name)},
			"no file in this directory is read: the built-in defaults apply")
	}
	_, listed := p.set[KeyNonMasqueradeCIDRs]
	theirs := slices.IndexFunc(p.files, func(f *file) bool { return strings.HasPrefix(filepath.Base(f.name), "ip-masq") })
	if p.joined && !listed && theirs >= 0 {
		p.add(Warning, "noList", Position{File: p.files[theirs].name},
			"no file in this directory sets %s: its default applies, but ip-masq-agent-v2 exempts link-local "+
				"destinations alone; for the same write \"%[1]s: []\", or else list what to exempt", KeyNonMasqueradeCIDRs)
	}
}

// checkLists checks the length of nonMasqueradeCIDRs, and warns once per list about
// IPv6 CIDRs while IPv6 is off.
func (p *parser) checkLists() {
	position, listed := p.set[KeyNonMasqueradeCIDRs]
	n := len(p.config.NonMasqueradeCIDRs)
	limit := p.config.CIDRLimit
	if listed && n == 0 {
		p.add(Warning, "emptyList", position,
			"%s is empty: not even the default ranges are exempt (to keep them, leave the key out)", KeyNonMasqueradeCIDRs)
	}
	if n > limit {
		level := Error
		ignored := ""
		if p.joined {
			level = Warning
			ignored = "; this is ignored in a directory"
		}
		p.add(level, "cidrLimit", p.set[keyCIDRLimit], "%s is %d, but %s has %d entries%s",
			keyCIDRLimit, limit, KeyNonMasqueradeCIDRs, n, ignored)
	}
	for _, row := range table {
		list := row.Entries(p.config)
		first := slices.IndexFunc(list, func(c CIDR) bool { return c.Addr().Is6() })
		if first >= 0 && !p.config.EnableIPv6 {
			p.add(Warning, "ipv6Off", list[first].Pos,
				"%s: IPv6 CIDRs (the first is here) have no effect while IPv6 is off: set %s or --enable-ipv6",
				row.Key, KeyEnableIPv6)
		}
	}
}

// checkNeedsPods checks that a key that is on does not concern more than pods. harm is
// what it would do.
func (p *parser) checkNeedsPods(key string, on bool, harm string) {
	c := p.config
	position := p.set[key]
	ipv4 := c.knowsPods(false)
	ipv6 := c.knowsPods(true)
	const noEffect = "%s has no effect on %s: %s has no such entry"
	switch {
	case !on:
	case !ipv4 && !ipv6:
		p.add(Error, "needsSources", position, "%s needs %s or %s: without them it would also %s "+
			"containers and virtual machines of Docker and other programs",
			key, KeyMasqueradeSrcCIDRs, KeyMasqueradeSrcInterfaces, harm)
	case !ipv4:
		p.add(Warning, "noEffect", position, noEffect, key, "IPv4", KeyMasqueradeSrcCIDRs)
	case !ipv6 && c.EnableIPv6:
		p.add(Warning, "noEffect", position, noEffect, key, "IPv6", KeyMasqueradeSrcCIDRs)
	}
}

// checkPortsPerPod checks that pods are known, and that there are no snatRules: each entry would need
// a chain for each block.
func (p *parser) checkPortsPerPod() {
	blocks := p.config.PortsPerPod > 0
	p.checkNeedsPods(KeyPortsPerPod, blocks, "give blocks of ports to")
	if rules := p.config.SNATRules; blocks && len(rules) > 0 {
		p.add(Error, "conflictingKeys", p.set[KeyPortsPerPod],
			"%s cannot be combined with %s, whose first entry is at %s: remove one of "+
				"them, or list the addresses for all pods in %s", KeyPortsPerPod, KeySNATRules, rules[0].Pos, KeySNATAddresses)
	}
}

// knowsPods reports whether the config identifies connections of a family that
// come from pods, as opposed to other containers or virtual machines on the node.
func (c Config) knowsPods(ipv6 bool) bool {
	return slices.ContainsFunc(table, func(row Row) bool {
		ofFamily := func(cidr CIDR) bool { return cidr.Addr().Is6() == ipv6 }
		return row.LimitsSources() && (len(row.Interfaces(c)) > 0 || slices.ContainsFunc(row.Entries(c), ofFamily))
	})
}

package health

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/iprange"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/older"
	"nft-masq-agent/nft/routes"
)

// IDs of the problems that [Node.Check] finds, by weight.
var IDs = []string{
	NotANode, LegacyTables, Everything, NoPods, Forwarding, OtherFile, SingleFile, Conntrack, InsertFailed,
}

// The IDs.
const (
	NotANode     = "not-a-node"
	LegacyTables = "legacy-tables"
	Everything   = "everything-exempt"
	NoPods       = "no-pods"
	Forwarding   = "forwarding-off"
	OtherFile    = "config-other-file"
	SingleFile   = "config-single-file"
	Conntrack    = "conntrack-full"
	InsertFailed = "insert-failed"
	IPv6Pods     = "ipv6-pods"     // a note
	Unchecked    = "unchecked"     // a warning
	RoutingRules = "routing-rules" // a warning
	StrictReply  = "rp-filter"     // a note of explain and connections
)

// A Node is what a check reads.
type Node struct {
	Proc       string // mount point of procfs
	Pods       func(ipv6 bool) ([]netip.Addr, error)
	Interfaces func() ([]routes.Interface, error)
	Networks   func() ([]routes.Network, error)
	Rules      func() ([]routes.SourceRule, error)
	Others     func() (bool, error) // whether another program has NAT rules
	Stats      func() (conntrack.Stats, error)

	failed *uint64 // insert_failed at the last check; nil: none
}

// On returns what a check reads of this node, besides its pods and what other programs' chains are.
func On(proc string, pods func(ipv6 bool) ([]netip.Addr, error), others func() (bool, error)) Node {
	return Node{
		Proc: proc, Pods: pods, Interfaces: routes.Interfaces, Networks: routes.Networks, Rules: routes.SourceRules,
		Others: others, Stats: conntrack.Open().Stats,
	}
}

// Check returns what is wrong with a node on which the policy of the config at a path is in
// force, by weight.
func (n *Node) Check(p nft.Policy, path string) (found config.Problems) {
	pods := map[bool][]netip.Addr{}
	for _, ipv6 := range []bool{false, true} {
		list, err := n.Pods(ipv6)
		found = append(found, unchecked("the pods of this node", err)...)
		pods[ipv6] = list
	}
	for _, check := range []config.Problems{
		n.namespace(), n.legacy(), everything(p), noPods(p, pods), n.forwarding(p, pods), n.routing(p, pods), files(path),
		n.conntrack(), ipv6Pods(p, pods[true]),
	} {
		found = append(found, check...)
	}
	return found
}

func problem(level config.Level, id, details, format string, args ...any) config.Problems {
	return config.Problems{{ID: id, Level: level, Msg: fmt.Sprintf(format, args...), Details: details}}
}

// unchecked says what could not be read.
func unchecked(what string, err error) config.Problems {
	if err == nil {
		return nil
	}
	return problem(config.Warning, Unchecked, "", "cannot read %s: %v", what, err)
}

// namespace finds a network namespace that is plainly that of a pod: its one interface is a
// veth that leads elsewhere, and no program but this one translates.
func (n *Node) namespace() config.Problems {
	links, err := n.Interfaces()
	if err != nil {
		return unchecked("the interfaces", err)
	}
	links = slices.DeleteFunc(links, func(i routes.Interface) bool { return i.Name == "lo" || !i.Up })
	if len(links) != 1 || links[0].Kind != "veth" || !links[0].Elsewhere {
		return nil
	}
	if others, err := n.Others(); err != nil || others {
		return unchecked("other programs' rules", err)
	}
	return problem(config.Error, NotANode, fmt.Sprintf("its only way out is %s, a veth that leads to another one, and no "+
		"other program translates here\nset hostNetwork: true in the pod, or run nsenter -t 1 -n nft-masq-agent status",
		config.Printable(links[0].Name)), "this is not the node's network namespace")
}

// legacy finds tables of legacy ip_tables that decide, too.
func (n *Node) legacy() config.Problems {
	tables, err := older.LegacyTables(filepath.Join(n.Proc, "thread-self/net"))
	if err != nil || len(tables) == 0 {
		return unchecked("legacy ip_tables", err)
	}
	return problem(config.Error, LegacyTables, LegacyDetails(tables),
		"unknown: rules in legacy ip_tables (%s) decide, too", tableNames(tables))
}

func tableNames(tables []older.LegacyTable) string {
	var names []string
	for _, t := range tables {
		names = append(names, t.String())
	}
	return strings.Join(names, ", ")
}

// LegacyDetails says what to do about tables of legacy ip_tables.
func LegacyDetails(tables []older.LegacyTable) string {
	details := "nf_tables does not show them, so no answer takes them into account; these commands do:"
	for _, t := range tables {
		details += "\n" + t.Command()
	}
	return details + "\nmove their program to iptables-nft, or flush the tables"
}

// everything finds a policy that masquerades nothing.
func everything(p nft.Policy) config.Problems {
	at := ""
	if len(p.Families) == 0 { // there is no policy
		return nil
	}
	for _, f := range p.Families {
		if !judge.Masqueraded(f).Empty() {
			return nil
		}
		for _, c := range f.List(config.KeyNonMasqueradeCIDRs).CIDRs {
			if c.Bits() == 0 && at == "" {
				at = fmt.Sprintf("%s has %s (%s)\n", config.KeyNonMasqueradeCIDRs, c, c.Pos)
			}
		}
	}
	return problem(config.Error, Everything,
		at+"nft-masq-agent check shows what each entry means; if that is meant, remove the agent",
		"nothing is masqueraded: the config exempts every connection")
}

// noPods finds a list of sources that has none of the node's pods.
func noPods(p nft.Policy, pods map[bool][]netip.Addr) (found config.Problems) {
	for _, f := range p.Families {
		sources, here := f.List(config.KeyMasqueradeSrcCIDRs), pods[f.IPv6]
		in := func(a netip.Addr) bool {
			return slices.ContainsFunc(sources.CIDRs, func(c config.CIDR) bool { return c.Contains(a) })
		}
		if len(sources.CIDRs) == 0 || len(here) == 0 || slices.ContainsFunc(here, in) {
			continue
		}
		first := sources.CIDRs[0]
		details := fmt.Sprintf("the list begins with %s (%s); this node's pods have addresses such as %s\n"+
			"add the network of the pods (kubectl get nodes -o wide and the CNI's config have it)", first, first.Pos, here[0])
		found = append(found, problem(config.Error, NoPods, details,
			"nothing is masqueraded: none of this node's %d %s pods is in %s", len(here), family(f.IPv6),
			config.KeyMasqueradeSrcCIDRs)...)
	}
	return found
}

func family(ipv6 bool) string {
	if ipv6 {
		return "IPv6"
	}
	return "IPv4"
}

// sysctl reads a setting of the kernel by its path.
func sysctl(proc, name string) (string, error) {
	text, err := os.ReadFile(filepath.Join(proc, "sys", name))
	return strings.TrimSpace(string(text)), err
}

// Forwards says whether the node forwards packets of the policy's families.
func (n *Node) Forwards(p nft.Policy) string {
	for _, f := range p.Families {
		switch value, err := sysctl(n.Proc, forwards[f.IPv6]); {
		case err != nil:
			return "unknown"
		case value == "0":
			return "off for " + family(f.IPv6) + ", and no pods are known"
		}
	}
	return "on"
}

// forwards are the settings with which the node forwards packets of IPv6, or of IPv4.
var forwards = map[bool]string{false: "net/ipv4/ip_forward", true: "net/ipv6/conf/all/forwarding"}

// forwarding finds families whose packets the node does not forward although it has pods.
func (n *Node) forwarding(p nft.Policy, pods map[bool][]netip.Addr) (found config.Problems) {
	for _, f := range p.Families {
		name := forwards[f.IPv6]
		value, err := sysctl(n.Proc, name)
		switch setting := strings.ReplaceAll(name, "/", "."); {
		case len(pods[f.IPv6]) == 0:
		case err != nil:
			found = append(found, unchecked(setting, err)...)
		case value == "0":
			found = append(found, problem(config.Error, Forwarding, "sysctl -w "+setting+"=1",
				"no pod reaches another host: %s forwarding is off", family(f.IPv6))...)
		}
	}
	return found
}

// NotForwarded returns what the node does not forward of packets that it receives on an interface for
// another destination, of a route type, and what would change that; "" if it forwards them.
func NotForwarded(proc, in string, dst netip.Addr, kind int) (what, remedy string) {
	dir := map[bool]string{false: "net/ipv4/conf/", true: "net/ipv6/conf/"}[dst.Is6()]
	off := func(name string) bool {
		value, _ := sysctl(proc, dir+name)
		return value == "0" // it does if that cannot be read
	}
	switch {
	case dst.IsMulticast() && off("all/mc_forwarding"):
		return "multicast", "a multicast router would do that"
	case kind == unix.RTN_BROADCAST:
		return "broadcasts", ""
	case kind != unix.RTN_UNICAST && kind != unix.RTN_UNSPEC: // the latter if the kernel finds no route because of it
	case dst.Is6() && off("all/forwarding"), dst.Is4() && off(in+"/forwarding"): // IPv6's own is for router advertisements
		return "packets", "sysctl -w " + strings.ReplaceAll(forwards[dst.Is6()], "/", ".") + "=1"
	}
	return "", ""
}

// routing finds a pod whose routing rules lead to some networks alone, such as those of a VPC, and an
// exempt destination that is in none of them, nor has a route of its own: packets leave by the default
// route, where the network may not expect the pod's address.
func (n *Node) routing(p nft.Policy, pods map[bool][]netip.Addr) config.Problems {
	rules, err := n.Rules()
	if err != nil || len(rules) == 0 {
		return unchecked("routing rules", err)
	}
	networks, err := n.Networks()
	if err != nil {
		return unchecked("routes", err)
	}
	for _, f := range p.Families {
		expected, sources := judge.Masqueraded(f).Dst, judge.Pods(f).Src
		for _, network := range networks {
			if network.Bits() > 0 {
				expected = append(expected, iprange.Of(network.Prefix))
			}
		}
		for _, pod := range pods[f.IPv6] {
			of := slices.DeleteFunc(slices.Clone(rules), func(r routes.SourceRule) bool { return !r.From.Contains(pod) })
			if len(of) == 0 || !iprange.Contains(sources, pod) {
				continue
			}
			led := slices.Clone(expected)
			for _, r := range of {
				led = append(led, iprange.Of(r.To))
			}
			led = iprange.Normal(led)
			for _, c := range f.List(config.KeyNonMasqueradeCIDRs).CIDRs {
				if !c.Addr().IsLinkLocalUnicast() && len(iprange.Subtract([]iprange.Range{iprange.Of(c.Prefix)}, led)) > 0 {
					return problem(config.Warning, RoutingRules, fmt.Sprintf("%s (%s) leaves by another table than that of %s\n%s",
						c, c.Pos, of[0], Dropped), "pods keep their address to %s, but no routing rule from %s leads there", c, pod)
				}
			}
		}
	}
	return nil
}

// Dropped is why it matters by which interface packets of pods leave.
const Dropped = "EC2 drops such packets of secondary interfaces; with AWS VPC CNI, list it in " +
	"AWS_VPC_K8S_CNI_EXCLUDE_SNAT_CIDRS, too"

// ipv6Pods notes that pods have addresses that nothing is done about.
func ipv6Pods(p nft.Policy, pods []netip.Addr) config.Problems {
	if _, on := p.Family(true); on || len(pods) == 0 {
		return nil
	}
	return problem(config.Note, IPv6Pods, "",
		"IPv6 is off: pods keep their IPv6 addresses (%d here, such as %s); set enableIPv6 to masquerade them",
		len(pods), pods[0])
}

// files finds a config that is missing next to another one, and one that no longer follows
// its source.
func files(path string) config.Problems {
	var s unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_NLINK|unix.STATX_TYPE, &s)
	single := s.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0 && s.Mode&unix.S_IFMT == unix.S_IFREG
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return otherFile(path)
	case err != nil || !single:
		return nil //nolint:nilerr // the config is rejected then
	}
	// Whoever writes such a file replaces it: the kubelet, kubectl, editors. It may have happened
	// before the mount, so that the link count alone does not show that the file is not followed.
	state := "does not follow its source when that is replaced"
	if s.Nlink == 0 {
		state = "no longer follows its source, which was replaced"
	}
	return problem(config.Error, SingleFile, "mount the directory instead of the file, and restart the pod",
		"the config %s: it is mounted as a single file (subPath)", state)
}

// otherFile finds a file that is probably meant, such as another key of a ConfigMap.
func otherFile(path string) config.Problems {
	dir := filepath.Dir(path)
	sources, err := config.Read(dir)
	if err != nil {
		return nil //nolint:nilerr // then nothing is known of other files
	}
	for _, s := range sources {
		if !s.Ignored {
			return problem(config.Error, OtherFile, fmt.Sprintf("there is no %s, but %s\n"+
				"name that file (the key of the ConfigMap) %s, or give --config %[2]s", config.Printable(path), s.Name,
				config.Printable(filepath.Base(path))), "the defaults apply: the config file is missing, next to another one")
		}
	}
	return nil
}

// StrictReplies notes those of some interfaces whose rp_filter is strict, if connections have no
// reply: the kernel drops a reply that arrives by one of them, but whose source it has a route to by
// another.
func StrictReplies(proc string, silent int, interfaces []string) config.Problems {
	filter := func(name string) string {
		value, _ := sysctl(proc, "net/ipv4/conf/"+name+"/rp_filter") // unread: not known to be strict
		return value
	}
	// The larger one of the interface's and that of all applies.
	loose := func(name string) bool { return name == "" || max(filter("all"), filter(name)) != "1" }
	interfaces = slices.Compact(slices.Sorted(slices.Values(slices.DeleteFunc(interfaces, loose))))
	if silent == 0 || len(interfaces) == 0 {
		return nil
	}
	details := "replies are dropped that arrive there, but whose source has a route by another interface"
	for _, name := range interfaces {
		details += "\nsysctl -w net.ipv4.conf." + strings.ReplaceAll(config.Printable(name), ".", "/") + ".rp_filter=2"
	}
	return problem(config.Note, StrictReply, details,
		"%d connections have no reply, and rp_filter of %s is strict (1)", silent, strings.Join(interfaces, ", "))
}

// conntrack finds a full table of connections, and connections that it could not take since
// the last check.
func (n *Node) conntrack() (found config.Problems) {
	const full = 0.9
	s, err := n.Stats()
	if err != nil {
		return unchecked("the statistics of connection tracking", err)
	}
	if s.Limit > 0 && float64(s.Entries) >= full*float64(s.Limit) {
		found = problem(config.Error, Conntrack, fmt.Sprintf("sysctl -w net.netfilter.nf_conntrack_max=%d\n"+
			"nft-masq-agent connections shows who has them", 2*s.Limit),
			"new connections fail, or will: %d of %d connections are tracked", s.Entries, s.Limit)
	}
	if n.failed != nil && s.InsertFailed > *n.failed {
		found = append(found, problem(config.Warning, InsertFailed, "nft-masq-agent connections --ports shows where source "+
			"ports run out", "%d new connections failed since the last check, for want of a source port or room",
			s.InsertFailed-*n.failed)...)
	}
	n.failed = &s.InsertFailed
	return found
}

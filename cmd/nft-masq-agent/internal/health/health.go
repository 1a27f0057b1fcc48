package health

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/xtables"
)

// IDs of the problems that [Facts.Problems] finds, by weight.
var IDs = []string{InterfaceList, NoPods, LegacyTables, Forwarding, SingleFile, Conntrack}

// The IDs.
const (
	InterfaceList = "interface-list-unmatched"
	LegacyTables  = "legacy-tables"
	NoPods        = "no-pods"
	Forwarding    = "forwarding-off"
	SingleFile    = "config-single-file"
	Conntrack     = "conntrack-full"
	Unchecked     = "unchecked"         // a warning
	PodsNotExempt = "pods-not-exempt"   // a warning
	Timeout       = "conntrack-timeout" // a warning
	Everything    = "everything-exempt" // a note
)

// A Node reads facts of the node of the calling thread.
type Node struct {
	Proc string // mount point of procfs
}

// Facts are what was read of a node, besides its rules and its connections.
type Facts struct {
	Pods   []routes.Pod
	Links  []routes.Interface
	Legacy []xtables.LegacyTable
	// NotForwarding are the interfaces of pods whose packets the node does not forward, for each family.
	NotForwarding []NotForwarded
	Tracked       conntrack.Stats
	Timeouts      []conntrack.Timeout
	// Single is set if the config is mounted as a single file. Whoever writes such a file replaces it (the kubelet,
	// kubectl, editors), and the mount keeps the old one.
	Single bool

	unread config.Problems // what could not be read
}

// Read reads the facts of the node. The config is at a path. When ctx is done, no more pods are read.
func (n Node) Read(ctx context.Context, path string) Facts {
	var f Facts
	for _, ipv6 := range []bool{false, true} {
		if ctx.Err() != nil {
			return f
		}
		pods, err := routes.Pods(ipv6)
		f.CannotRead("the pods of this node", err)
		if err != nil {
			break
		}
		f.Pods = append(f.Pods, pods...)
	}
	var err error
	f.Links, err = routes.Interfaces()
	f.CannotRead("the interfaces", err)
	f.Tracked, err = conntrack.New().Stats()
	f.CannotRead("the statistics of connection tracking", err)
	f.Single = isMounted(path)
	n.readProc(&f)
	return f
}

// isMounted reports whether a file is the root of a mount. One that cannot be read is a rejected config.
func isMounted(path string) bool {
	var s unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_TYPE, &s)
	return err == nil && s.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0 && s.Mode&unix.S_IFMT == unix.S_IFREG
}

// readProc reads the facts that are in procfs; the pods are known.
func (n Node) readProc(f *Facts) {
	var err error
	f.Legacy, err = xtables.LegacyTables(filepath.Join(n.Proc, "thread-self/net"))
	f.CannotRead("rules of iptables", err)
	f.NotForwarding = n.notForwarding(f.Pods)
	if len(f.Pods) > 0 {
		_, err = os.Stat(filepath.Join(n.Proc, "sys/net/ipv4/ip_forward"))
		f.CannotRead("whether this node forwards packets", err)
	}
	f.Timeouts = conntrack.ReadTimeouts(n.Proc)
}

// CannotRead adds a warning that something could not be read, if there is an error.
func (f *Facts) CannotRead(subject string, err error) {
	if err != nil {
		f.unread = append(f.unread, problem(config.Warning, Unchecked, "", "cannot read %s: %v", subject, err))
	}
}

// Problems returns what is wrong with a node on which a policy is in force.
func (f *Facts) Problems(p nft.Policy) (found config.Problems) {
	found = append(found, f.unread...)
	found = append(found, f.interfaces(p)...)
	found = append(found, f.legacy()...)
	for _, family := range p.Families {
		found = append(found, f.podsOf(family)...)
	}
	for _, off := range f.NotForwarding {
		if _, enabled := p.Family(off.IPv6); enabled {
			found = append(found, problem(config.Error, Forwarding, off.Remedy,
				"no pod reaches another host: this node forwards no %s packets of %s", nft.FamilyName(off.IPv6),
				config.Printable(off.Interface)))
		}
	}
	if f.Single {
		found = append(found, problem(config.Error, SingleFile, "mount the directory instead of the file, and restart the "+
			"pod", "the config does not follow its source when that is replaced: it is mounted as a single file (subPath)"))
	}
	return append(found, f.conntrack()...)
}

func problem(level config.Level, id, details, format string, args ...any) config.Problem {
	return config.Problem{ID: id, Level: level, Msg: fmt.Sprintf(format, args...), Details: details}
}

// legacy finds nat tables of legacy ip_tables that are in use.
func (f *Facts) legacy() (found config.Problems) {
	for _, table := range f.Legacy {
		if table.Table != xtables.NATTable {
			continue
		}
		whose := "rules"
		if table.Older {
			whose = "rules of an iptables-based agent"
		}
		found = append(found, problem(config.Error, LegacyTables, table.Command()+
			" shows them\nstop their program, or move it to iptables-nft, and flush the table",
			"%s in legacy ip_tables (%s) translate, too", whose, table))
	}
	return found
}

// podsOf asks the policy of a family about one packet of each pod of the node.
func (f *Facts) podsOf(family nft.FamilyPolicy) config.Problems {
	dst, found := judge.MasqueradedDestination(family)
	if !found {
		return Exempt(family)
	}
	pods := slices.DeleteFunc(slices.Clone(f.Pods), func(p routes.Pod) bool { return p.Address.Is6() != family.IPv6 })
	if len(pods) == 0 {
		return nil
	}
	var uplinks []string
	for _, link := range f.Links {
		if link.Sends() && link.Name != "lo" {
			uplinks = append(uplinks, link.Name)
		}
	}
	if len(uplinks) == 0 {
		uplinks = []string{""}
	}
	policy := nft.Policy{Families: []nft.FamilyPolicy{family}}
	var packet nft.Connection
	var last judge.Step
	for _, pod := range pods {
		packet = nft.Connection{Src: pod.Address, Dst: dst, InInterface: pod.Interface}
		for _, uplink := range uplinks {
			packet.OutInterface = uplink
			steps, verdict := judge.Explain(policy, packet)
			if verdict == nft.Masqueraded {
				return notExempt(family, pods)
			}
			last = steps[len(steps)-1]
		}
	}
	return config.Problems{problem(config.Error, NoPods, fmt.Sprintf("such as %s, received on %s: see %s\n%s", packet.Src,
		config.Printable(packet.InInterface), last.Place(), remedy(last.Condition)),
		"nothing is masqueraded: %s excludes each of this node's %d %s pods", last.Condition.Key, len(pods),
		nft.FamilyName(family.IPv6))}
}

// remedy says how to change a condition that excludes all packets of pods.
func remedy(c nft.Condition) string {
	switch {
	case !c.Outside:
		return "remove what excludes them"
	case c.Asks == config.ReceivedOn:
		return "`ip route get POD` names the interface on which a pod's packets arrive, such as the bridge that it is a " +
			"port of: list that, or use " + config.KeyMasqueradeSrcCIDRs
	case c.Asks == config.LeavingBy:
		return "`ip route get ADDRESS` names the interface by which packets leave: list that"
	}
	return "add the network of the pods (kubectl get nodes -o wide and the CNI's config have it)"
}

// Exempt notes that a policy masquerades nothing of a family.
func Exempt(family nft.FamilyPolicy) config.Problems {
	if _, found := judge.MasqueradedDestination(family); found {
		return nil
	}
	return config.Problems{problem(config.Note, Everything, "",
		"the config exempts every %s connection: nothing is masqueraded", nft.FamilyName(family.IPv6))}
}

// notExempt warns of pods of the node that are not exempt as a destination: pods of other nodes that connect to them
// are seen as their node.
func notExempt(family nft.FamilyPolicy, pods []routes.Pod) config.Problems {
	outside := slices.DeleteFunc(slices.Clone(pods), func(p routes.Pod) bool {
		r := judge.Rule(&family, nft.Connection{Src: pods[0].Address, Dst: p.Address, InInterface: pods[0].Interface})
		return r.Verdict != nft.Masqueraded || r.Depends
	})
	if len(outside) == 0 {
		return nil
	}
	return config.Problems{problem(config.Warning, PodsNotExempt, "", "%d of this node's %d %s pods, such as %s, are "+
		"not in %s: "+
		"with the same config on other nodes, pods there connect to them with their node's address", len(outside), len(pods),
		nft.FamilyName(family.IPv6), outside[0].Address, config.KeyNonMasqueradeCIDRs)}
}

// sysctl reads a setting of the kernel by its path. One that this kernel does not have is "".
func (n Node) sysctl(name string) string {
	text, _ := os.ReadFile(filepath.Join(n.Proc, "sys", name))
	return strings.TrimSpace(string(text))
}

// A NotForwarded is an interface whose packets the node does not forward.
type NotForwarded struct {
	IPv6      bool
	Interface string
	Remedy    string // a command
}

// notForwarding returns the interfaces of pods whose packets the node does not forward.
func (n Node) notForwarding(pods []routes.Pod) (interfaces []NotForwarded) {
	for _, pod := range pods {
		remedy := n.forwardingOff(pod.Interface, pod.Address.Is6())
		off := NotForwarded{pod.Address.Is6(), pod.Interface, remedy}
		if remedy != "" && !slices.Contains(interfaces, off) {
			interfaces = append(interfaces, off)
		}
	}
	return interfaces
}

// forwardingOff returns the command that makes the node forward packets of a family that it receives on an
// interface; "" if it forwards them, or that cannot be read. For IPv4 the interface's own setting counts
// (ip_route_input_slow), for IPv6 that of all interfaces, or since Linux 6.17 force_forwarding of the interface
// (ip6_forward).
func (n Node) forwardingOff(link string, ipv6 bool) string {
	if ipv6 {
		if n.sysctl("net/ipv6/conf/all/forwarding") == "0" && n.sysctl("net/ipv6/conf/"+link+"/force_forwarding") != "1" {
			return "sysctl -w net.ipv6.conf.all.forwarding=1"
		}
		return ""
	}
	if n.sysctl("net/ipv4/conf/"+link+"/forwarding") != "0" {
		return ""
	}
	if n.sysctl("net/ipv4/ip_forward") == "0" {
		return "sysctl -w net.ipv4.ip_forward=1"
	}
	return "sysctl -w " + nfnetlink.Quote("net/ipv4/conf/"+link+"/forwarding=1")
}

// Forwards returns what the node does not forward of packets that it receives on an interface for
// another destination, of a route type, and the command that would change that; "" if it forwards them.
func (n Node) Forwards(in string, dst netip.Addr, kind int) (kept, remedy string) {
	family := "net/ipv4/conf/"
	if dst.Is6() {
		family = "net/ipv6/conf/"
	}
	switch {
	case dst.IsMulticast():
		if n.sysctl(family+"all/mc_forwarding") == "0" {
			return "multicast", "a multicast router would do that"
		}
	case kind == unix.RTN_BROADCAST:
		return "broadcasts", "name the address of a host"
	case kind == unix.RTN_UNICAST, kind == unix.RTN_UNSPEC: // the latter if the kernel finds no route because of it
		remedy = n.forwardingOff(in, dst.Is6())
		if remedy != "" {
			return "packets", remedy
		}
	}
	return "", ""
}

// conntrack finds a full table of connections, and timeouts with which nothing is known of replies.
func (f *Facts) conntrack() (found config.Problems) {
	const full = 0.9
	if s := f.Tracked; s.Limit > 0 && float64(s.Entries) >= full*float64(s.Limit) {
		found = append(found, problem(config.Error, Conntrack, fmt.Sprintf("sysctl -w net.netfilter.nf_conntrack_max=%d\n"+
			"nft-masq-agent connections shows who has them", 2*s.Limit),
			"new connections fail, or will: %d of %d connections are tracked", s.Entries, s.Limit))
	}
	for _, t := range f.Timeouts {
		if t.HidesSilence() {
			found = append(found, problem(config.Warning, Timeout, fmt.Sprintf("sysctl -w net.netfilter.%s=%d", t.Name,
				t.Default), "%s connections without a reply are forgotten after %d s: a later reply does not reach a masqueraded "+
				"pod, and which destinations do not answer is unknown", conntrack.ProtocolName(t.Protocol), t.Seconds))
		}
	}
	return found
}

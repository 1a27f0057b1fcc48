package main

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/stress/knownbad"
	"nft-masq-agent/nft/nfttest"
)

// An alternative is what a user could pick instead of the agent: what the program does to the kernel, without the
// program itself and without the time until it begins.
type alternative struct {
	name       string
	replace    func(*nfttest.NS, []netip.Prefix) error // the rules by those of a list
	lists      bool                                    // otherwise it does not have a list
	everything bool                                    // it exempts nothing
}

func alternatives() []alternative {
	return []alternative{
		{name: "ip-masq-agent v2.12.6", replace: replaceOlder, lists: true},
		{name: "kindnet", replace: replaceKindnet, lists: true},
		{name: "flannel, nftables, without a list", replace: replaceByText(flannelRules)},
		{name: "bare masquerade, nft -f", replace: replaceByText(bareAgain), everything: true},
	}
}

// replaceByText returns what loads the same text for each list.
func replaceByText(text string) func(*nfttest.NS, []netip.Prefix) error {
	return func(ns *nfttest.NS, _ []netip.Prefix) error { return ofNft(text)(ns) }
}

// bareAgain replaces a bare masquerade by itself.
const bareAgain = "table inet bare\nflush table inet bare\n" + bareMasquerade

// replaceOlder does what ip-masq-agent v2.12.6 does in each round, which is every minute unless resyncInterval says
// otherwise: it calls iptables to have the chain and the jump, then iptables-restore with all rules. A list of more
// than 64 networks needs its cidrLimit.
func replaceOlder(ns *nfttest.NS, networks []netip.Prefix) error {
	const wait = "5" // seconds, for the lock of the legacy programs
	call := func(args ...string) error {
		return ofProgram("", "iptables-nft", append([]string{"-w", wait}, args...)...)(ns)
	}
	_ = call("-N", "IP-MASQ-AGENT", "-t", "nat") // it fails if there is one
	jump := []string{
		"POSTROUTING", "-t", "nat", "-m", "comment", "--comment", "ip-masq-agent: ensure nat POSTROUTING directs all " +
			"non-LOCAL destination traffic to our custom IP-MASQ-AGENT chain",
		"-m", "addrtype", "!", "--dst-type", "LOCAL", "-j", "IP-MASQ-AGENT",
	}
	if err := call(append([]string{"-C"}, jump...)...); err != nil {
		if err := call(append([]string{"-A"}, jump...)...); err != nil {
			return err
		}
	}
	var text strings.Builder
	text.WriteString("*nat\n:IP-MASQ-AGENT - [0:0]\n")
	linkLocal := netip.MustParsePrefix("169.254.0.0/16")
	for _, p := range append([]netip.Prefix{linkLocal}, networks...) {
		fmt.Fprintf(&text, "-A IP-MASQ-AGENT -m comment --comment "+
			"\"ip-masq-agent: local traffic is not subject to MASQUERADE\" -d %s -j RETURN\n", p)
	}
	text.WriteString("-A IP-MASQ-AGENT -m comment --comment " +
		"\"ip-masq-agent: outbound traffic is subject to MASQUERADE (must be last in chain)\" " +
		"-j MASQUERADE --random-fully\nCOMMIT\n")
	return ofProgram(text.String(), "iptables-nft-restore", "-w", wait, "--noflush")(ns)
}

// flannelRules are those of flannel for IPv4 in its mode nftables, as it writes them at its start with nft -f. Another
// network of the cluster needs a start.
const flannelRules = `add table ip flannel-ipv4 { comment "rules for flannel-ipv4" ; }
add chain ip flannel-ipv4 postrtg { type nat hook postrouting priority srcnat ; }
flush chain ip flannel-ipv4 postrtg
add rule ip flannel-ipv4 postrtg meta mark 0x4000 return
add rule ip flannel-ipv4 postrtg ip saddr 10.244.1.0/24 ip daddr 10.244.0.0/16 return
add rule ip flannel-ipv4 postrtg ip saddr 10.244.0.0/16 ip daddr 10.244.1.0/24 return
add rule ip flannel-ipv4 postrtg ip saddr != 10.244.1.0/24 ip daddr 10.244.0.0/16 return
add rule ip flannel-ipv4 postrtg ip saddr 10.244.0.0/16 ip daddr != 224.0.0.0/4 masquerade fully-random
add rule ip flannel-ipv4 postrtg ip saddr != 10.244.0.0/16 ip daddr 10.244.0.0/16 masquerade fully-random
`

// replaceKindnet sends the transaction of kindnet, five seconds after the change of a Node: it deletes its table, and
// creates it with its sets, its elements and its rules.
func replaceKindnet(ns *nfttest.NS, networks []netip.Prefix) error {
	c, err := nftables.New(nftables.WithNetNSFd(ns.Fd()))
	if err != nil {
		return err
	}
	table := &nftables.Table{Family: nftables.TableFamilyINet, Name: "kindnet-ipmasq"}
	c.AddTable(table)
	c.DelTable(table)
	c.AddTable(table)
	v4 := &nftables.Set{Table: table, Name: "noMasqV4", KeyType: nftables.TypeIPAddr, Interval: true, AutoMerge: true}
	v6 := &nftables.Set{Table: table, Name: "noMasqV6", KeyType: nftables.TypeIP6Addr, Interval: true, AutoMerge: true}
	if err := c.AddSet(v4, knownbad.Elements(networks)); err != nil {
		return err
	}
	if err := c.AddSet(v6, nil); err != nil {
		return err
	}
	chain := c.AddChain(&nftables.Chain{
		Table: table, Name: "postrouting", Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPostrouting,
		Priority: nftables.ChainPriorityRef(*nftables.ChainPriorityNATSource - 10),
	})
	for _, exprs := range kindnetRules() {
		c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: exprs})
	}
	return c.Flush()
}

// kindnetRules are those of kindnet. Its counter is behind masquerade, where it counts nothing.
func kindnetRules() [][]expr.Any {
	accept := &expr.Verdict{Kind: expr.VerdictAccept}
	states := binaryutil.NativeEndian.PutUint32(expr.CtStateBitESTABLISHED | expr.CtStateBitRELATED)
	zero := make([]byte, 4)
	exempt := func(family byte, offset, length uint32, set string) []expr.Any {
		return []expr.Any{
			&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{family}},
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: length},
			&expr.Lookup{SourceRegister: 1, SetName: set},
			accept,
		}
	}
	return [][]expr.Any{
		{
			&expr.Ct{Register: 1, Key: expr.CtKeySTATE},
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: states, Xor: zero},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: zero},
			accept,
		},
		{
			&expr.Fib{Register: 1, FlagDADDR: true, ResultADDRTYPE: true},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(unix.RTN_LOCAL)},
			accept,
		},
		exempt(unix.NFPROTO_IPV4, 16, 4, "noMasqV4"),
		exempt(unix.NFPROTO_IPV6, 24, 16, "noMasqV6"),
		{&expr.Masq{}, &expr.Counter{}},
	}
}

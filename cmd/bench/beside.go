package main

import (
	"context"
	"fmt"
	"net"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfttest"
)

const groupBeside = "status next to rules of other programs"

// A crowd is the rules of another program, and how many connections of pods are open, which the
// agent would masquerade and nobody did.
type crowd struct {
	name        string
	program     string // that loads the rules
	args        []string
	rules       func() string
	connections int
	// processor and memory are targets of the processor time, in ms, and of the peak memory, in MB; 0: there are none.
	processor, memory float64
}

func crowds() []crowd {
	nft, iptables := []string{"-f", "-"}, []string{"--noflush"}
	return []crowd{
		{"1,000 published ports", "iptables-nft-restore", iptables, func() string { return publishedPorts(1000) }, 0, 0, 0},
		{
			"5,000 Services of kube-proxy, iptables", "iptables-nft-restore", iptables,
			func() string { return servicesText(5000) }, 0, 0, 0,
		},
		{"5,000 Services of kube-proxy, nftables", "nft", nft, func() string { return kubeProxyText(5000) }, 0, 0, 0},
		{"120,000 rules", "nft", nft, func() string { return pairsText(120_000) }, 0, 0, 0},
		{"4,500 rules, 100,000 connections", "nft", nft, func() string { return pairsText(4500) }, 100_000, 0, 0},
		{"20,000 rules, 30,000 connections", "nft", nft, func() string { return pairsText(20_000) }, 30_000, 1000, 40},
	}
}

// beside measures status, from the start of the process to its end, and its peak memory. It
// works for binaries of earlier versions, too.
func (b *bench) beside(ctx context.Context) {
	for _, c := range crowds() {
		took, processor, peak := b.besideOf(ctx, c)
		time := newRow(groupBeside, defaultSize, c.name, "ms", took)
		if c.connections > 0 {
			time = time.target(2000)
		}
		b.add(time)
		memory := newRow(groupBeside, defaultSize, c.name+", peak memory", "MB", peak)
		if c.processor > 0 {
			b.add(newRow(groupBeside, defaultSize, c.name+", processor time", "ms", processor).target(c.processor))
			memory = memory.target(c.memory)
		}
		b.add(memory)
	}
}

func (b *bench) besideOf(ctx context.Context, c crowd) (took, processor, peak series) {
	n := nfttest.Must(openNode("bench-beside"))
	defer func() { nfttest.Check(n.close()) }()
	v := nfttest.Must(newVolume("masqueradeSrcCIDRs: [10.244.0.0/16]\n"))
	defer func() { nfttest.Check(v.Close()) }()
	nfttest.Must(timeToApplied(n, b.agent, v.Path()))
	nfttest.Must(n.ns.Output(c.rules(), c.program, c.args...))
	nfttest.Check(openConnections(n.ns, c.connections))
	for range b.rounds {
		nfttest.Check(ctx.Err())
		usage := nfttest.Must(measured(n.ns, b.agent, "status", "--config", v.Path()))
		took = append(took, usage.Took.Seconds())
		processor = append(processor, usage.Processor.Seconds())
		peak = append(peak, float64(usage.Peak)/1e6)
	}
	return took, processor, peak
}

// pairsText returns rules for a source and a network each.
func pairsText(rules int) string {
	var s strings.Builder
	s.WriteString("table ip others {\nchain post { type nat hook postrouting priority 110;\n")
	for i := range rules {
		fmt.Fprintf(&s, "ip saddr 10.244.%d.%d ip daddr 172.%d.%d.0/24 masquerade\n", i>>8&0xff, i&0xff, 16+i>>16, i>>8&0xff)
	}
	return s.String() + "}\n}\n"
}

// publishedPorts returns what Docker writes for a container with so many published ports.
func publishedPorts(ports int) string {
	var s strings.Builder
	s.WriteString("*nat\n:DOCKER - [0:0]\n-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER\n" +
		"-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE\n-A DOCKER -i docker0 -j RETURN\n")
	for i := range ports {
		to := fmt.Sprintf("172.17.%d.%d", i>>8, 2+i&0xff%253)
		fmt.Fprintf(&s, "-A POSTROUTING -s %s/32 -d %[1]s/32 -p tcp -m tcp --dport %d -j MASQUERADE\n"+
			"-A DOCKER ! -i docker0 -p tcp -m tcp --dport %[2]d -j DNAT --to-destination %[1]s:%[2]d\n", to, 8000+i)
	}
	return s.String() + "COMMIT\n"
}

// servicesText returns what kube-proxy in mode iptables writes for so many Services with two
// endpoints each.
func servicesText(services int) string {
	var chains, rules strings.Builder
	for i := range services {
		ip := fmt.Sprintf("10.63.%d.%d", i>>8, i&0xff)
		fmt.Fprintf(&chains, ":KUBE-SVC-%d - [0:0]\n", i)
		fmt.Fprintf(&rules, "-A KUBE-SERVICES -d %s/32 -p tcp -m comment --comment \"ns/s%d cluster IP\" -m tcp --dport 80 "+
			"-j KUBE-SVC-%[2]d\n-A KUBE-SVC-%[2]d ! -s 10.244.0.0/16 -d %[1]s/32 -p tcp -m tcp --dport 80 "+
			"-j KUBE-MARK-MASQ\n", ip, i)
		for e, how := range []string{" -m statistic --mode random --probability 0.5", ""} {
			pod := fmt.Sprintf("10.%d.%d.%d", 65+e, i>>8, i&0xff)
			fmt.Fprintf(&chains, ":KUBE-SEP-%d-%d - [0:0]\n", i, e)
			fmt.Fprintf(&rules, "-A KUBE-SVC-%d%s -j KUBE-SEP-%[1]d-%[3]d\n-A KUBE-SEP-%[1]d-%[3]d -s %s/32 -j KUBE-MARK-MASQ\n"+
				"-A KUBE-SEP-%[1]d-%[3]d -p tcp -m tcp -j DNAT --to-destination %[4]s:8080\n", i, how, e, pod)
		}
	}
	return "*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-POSTROUTING - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n" + chains.String() +
		"-A PREROUTING -j KUBE-SERVICES\n-A OUTPUT -j KUBE-SERVICES\n-A POSTROUTING -j KUBE-POSTROUTING\n" +
		"-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000\n" +
		"-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN\n" +
		"-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0\n-A KUBE-POSTROUTING -j MASQUERADE --random-fully\n" +
		rules.String() + "COMMIT\n"
}

// kubeProxyText returns what kube-proxy in mode nftables creates for that many Services with three
// endpoints each: chains, rules and a verdict map.
func kubeProxyText(services int) string {
	var s strings.Builder
	fmt.Fprintf(&s, "table ip %s {\n", otherTable)
	for i := range services {
		for e := range 3 {
			fmt.Fprintf(&s, "chain endpoint-%d-%d {\nip saddr 10.64.%d.%d counter\nmeta l4proto tcp dnat to "+
				"10.%d.%d.%d:8080\n}\n",
				i, e, i>>8, i&0xff, 65+e, i>>8, i&0xff)
		}
		fmt.Fprintf(&s, "chain service-%d {\nip daddr 10.63.%d.%d tcp dport 80 ip saddr != 10.64.0.0/10 counter\n"+
			"numgen random mod 3 vmap { 0 : goto endpoint-%[1]d-0, 1 : goto endpoint-%[1]d-1, 2 : goto endpoint-%[1]d-2 }\n}\n",
			i, i>>8, i&0xff)
	}
	s.WriteString("map services {\ntype ipv4_addr . inet_proto . inet_service : verdict\nelements = {\n")
	for i := range services {
		fmt.Fprintf(&s, "10.63.%d.%d . tcp . 80 : goto service-%d,\n", i>>8, i&0xff, i)
	}
	return s.String() + "}\n}\nchain prerouting {\ntype nat hook prerouting priority dstnat;\n" +
		"ip daddr . meta l4proto . th " +
		"dport vmap @services\n}\nchain masquerading {\ntype nat hook postrouting priority srcnat;\n" +
		"meta mark & 0x4000 == 0x4000 masquerade\n}\n}\n"
}

// openConnections adds connections over UDP, which nobody translates, to connection tracking, for ten minutes, each
// from another pod or port.
func openConnections(ns *nfttest.NS, n int) error {
	h, err := ns.Netlink()
	for i := 0; i < n && err == nil; i++ {
		pod, dst := net.IP{10, 244, byte(i % 4500 >> 8), byte(i % 4500)}, net.IP{203, 0, 113, byte(i % 250)}
		port := uint16(1024 + i/4500)
		err = h.ConntrackCreate(netlink.ConntrackTable, unix.AF_INET, &netlink.ConntrackFlow{
			FamilyType: unix.AF_INET, TimeOut: 600,
			Forward: netlink.IPTuple{Protocol: unix.IPPROTO_UDP, SrcIP: pod, SrcPort: port, DstIP: dst, DstPort: 53},
			Reverse: netlink.IPTuple{Protocol: unix.IPPROTO_UDP, SrcIP: dst, SrcPort: 53, DstIP: pod, DstPort: port},
		})
	}
	return err
}

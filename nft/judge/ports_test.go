package judge_test

import (
	"math"
	"net/netip"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest/cases"
)

func TestSourcePortsAreCountedOnce(t *testing.T) {
	for _, tt := range []struct {
		ports []nft.PortRange
		want  int
	}{
		{nil, 65536 - 1024},
		{[]nft.PortRange{{Min: 1, Max: 65535}}, 65535},
		{[]nft.PortRange{{Min: 5, Max: 5}}, 1},
		{[]nft.PortRange{{Min: 5, Max: 9}, {Min: 8, Max: 10}, {Min: 5, Max: 5}}, 6},
	} {
		among := judge.SourcePorts(nft.Policy{Ports: tt.ports})
		member := 0
		for port := range math.MaxUint16 + 1 {
			scope, ok := among(netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), uint16(port)))
			if ok {
				member++
			}
			if scope != (judge.PortScope{Block: -1, Ports: tt.want}) {
				t.Fatalf("%v: port %d is among %+v, want %d", tt.ports, port, scope, tt.want)
			}
		}
		if member != tt.want {
			t.Errorf("%v: %d are named, want %d", tt.ports, member, tt.want)
		}
	}
	names := ""
	for _, p := range append(nft.PortProtocols(), 33) {
		names += p.String() + " "
	}
	if names != "tcp udp sctp 33 " {
		t.Error(names)
	}
}

func TestPortsOfAConnectionAreThoseOfItsBlock(t *testing.T) {
	c := config.Config{
		MasqueradeSrcCIDRs: cases.CIDRs("10.244.0.0/16"),
		EnableIPv6:         true,
		PortsPerPod:        250,
	}
	ports := judge.SourcePorts(nft.NewPolicy(c, nft.Options{Layout: native.Layout{}}))
	for seen, want := range map[string]judge.PortScope{
		"192.0.2.1:2774": {Block: 7, Ports: 250}, "192.0.2.1:3023": {Block: 7, Ports: 250},
		"192.0.2.1:65024": {Block: -1, Ports: 512}, "192.0.2.1:1023": {Block: -1},
		"[2001:db8::1]:2774": {Block: -1, Ports: 64512}, // IPv6 sources are not known to be pods
	} {
		got, ok := ports(netip.MustParseAddrPort(seen))
		if !ok {
			got.Ports = 0
		}
		if got != want {
			t.Errorf("%s: %+v, want %+v", seen, got, want)
		}
	}
}

package main

import (
	"context"
	"fmt"
	"net/netip"
	"strings"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
)

// Each of the pods has a block of its own, in each family.
const (
	podCount   = 50
	blockSize  = 250
	podSources = `masqueradeSrcCIDRs: [10.244.0.0/16, "fd00:10:244::/48"]`
)

// portsNamePods changes the file and the addresses of the node while fifty pods connect. Each packet
// says which pod has sent it: the port must name that pod, without anything from the node.
func portsNamePods(ctx context.Context, b *bench) {
	p := policies(4, snatKey, podSources, fmt.Sprintf("portsPerPod: %d", blockSize))
	a := b.enforced(ctx, nft.ModeNFTables, p[0])
	f := &pods{blocks: nft.NewPortBlocks(blockSize, nil), samples: map[int]netip.AddrPort{}}
	for i := range podCount {
		f.all = append(f.all, netip.AddrFrom4([4]byte{10, 244, 1, byte(10 + i)}),
			netip.MustParseAddr(fmt.Sprintf("fd00:10:244:1::%x", 10+i)))
	}
	var all []nfttest.Target
	for _, dst := range masqueraded {
		all = append(all, nfttest.Target{Proto: nfttest.UDP, Dst: netip.MustParseAddr(dst), Masqueraded: true})
	}
	b.hammer = nfttest.Must(b.top.StartPods(nfttest.Pods{Addrs: f.all, Node: f.named}, all...))
	here := map[string]bool{}
	for b.more(ctx) {
		b.updates++
		moving := floating[b.updates%len(floating)]
		here[moving] = !here[moving]
		b.float(moving, here[moving])
		b.change(ctx, a, nft.ModeNFTables, p[b.updates%2])
	}
	nfttest.Must(b.hammer.Stop())
	b.namesPods(f)
}

// namesPods has the agent's program name one port of each pod, where the rules are not.
func (b *bench) namesPods(f *pods) {
	for i, seen := range f.samples {
		address := f.all[i].AsSlice()
		out := nfttest.Must(b.top.Outside.Output("", b.binary, "connections", "--config", b.config, "--enable-ipv6",
			"--seen-as", seen.String()))
		line, _, _ := strings.Cut(out, "\n")
		if !strings.Contains(line, fmt.Sprintf(" %d,", address[len(address)-1])) {
			nfttest.Check(fmt.Errorf("%s, which is of %s, is decoded as %q", seen, f.all[i], line))
		}
	}
}

// pods are the families in turn, and as what each was seen.
type pods struct {
	all     []netip.Addr
	blocks  nft.PortBlocks
	samples map[int]netip.AddrPort
}

// named reports whether a port names its pod.
func (f *pods) named(pod int, seen netip.AddrPort) bool {
	block, ok := f.blocks.BlockOf(seen.Port())
	if ok = ok && block == f.blocks.BlockOfPod(f.all[pod]); ok {
		f.samples[pod] = seen
	}
	return ok
}

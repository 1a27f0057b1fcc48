package kernel

import (
	"cmp"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

// enforcing exempts 10.0.0.0/8 and fd00::/8 for pods of 10.244.0.0/16 and
// fd00:10:244::/48.
func enforcing() config.Config {
	return config.Config{
		EnableIPv6:         true,
		NonMasqueradeCIDRs: cases.CIDRs("10.0.0.0/8", "fd00::/8"),
		MasqueradeSrcCIDRs: cases.CIDRs("10.244.0.0/16", "fd00:10:244::/48"),
		Enforce:            true,
	}
}

func enforcingOptions() nft.Options {
	return nft.Options{Layout: native.Layout{}, RandomFully: true, Marks: cases.Marks()}
}

// kube-proxy marks a pod's connection to itself through a Service, and inbound
// ones to a node port with externalTrafficPolicy Cluster; portmap marks a pod's
// connection to its own host port.
func TestPacketsMarkedByKubeProxyAreLeftToIt(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "iptables-nft-restore")
	for sample, marking := range map[string]string{
		"kube-proxy-iptables": "0x4000", "kube-proxy-nftables": "0x4000", "cni-portmap": "0x2000",
	} {
		t.Run(sample, func(t *testing.T) {
			t.Parallel()
			w := newWire(t)
			nfttest.LoadForeign(t, w.Node, filepath.Join("../../testdata/foreign", sample), nil)
			// A Service whose endpoint is the pod or a host outside: to 10.96.0.7 with a
			// mark, to 10.96.0.8 without. Likewise two node ports: of the node, and of 198.18.5.5.
			nfttest.NFT(t, w.Node, `table ip services {
				chain pre { type nat hook prerouting priority dstnat - 1; policy accept;
					ip daddr 10.96.0.7 meta mark set meta mark or `+marking+`
					ip daddr 10.96.0.7 dnat to 10.244.1.2
					ip daddr 10.96.0.8 dnat to 10.9.0.9
					ip daddr 192.0.2.1 udp dport 7777 meta mark set meta mark or `+marking+`
					ip daddr 192.0.2.1 udp dport 7777 dnat to 10.244.1.2
					ip daddr 198.18.5.5 dnat to 10.244.1.2
				}
			}`, "-f", "-")
			k, off := open(t, w.Node), enforcing()
			off.Enforce = false
			before := map[string]netip.Addr{}
			for _, c := range []config.Config{off, enforcing()} {
				apply(t, k, nft.Compile(c, enforcingOptions()), everything)
				for _, f := range []struct {
					name       string
					from, to   *nfttest.NS
					src        netip.Addr
					dst        string
					translated bool
				}{
					{"hairpin", w.Pod, w.Pod, w.PodV4, "10.96.0.7", true},
					{"ClusterIP", w.Pod, w.Outside, w.PodV4, "10.96.0.8", false},
					{"node port, Cluster", w.Outside, w.Pod, w.OutsideV4, "192.0.2.1", true},
					{"node port, Local", w.Outside, w.Pod, w.OutsideV4, "198.18.5.5", false},
				} {
					seen := w.through(t, f.from, f.to, f.src, f.dst)
					if before[f.name] = cmp.Or(before[f.name], seen); seen != before[f.name] || (seen != f.src) != f.translated {
						t.Errorf("%s: seen %s, without enforcement %s", f.name, seen, before[f.name])
					}
				}
			}
		})
	}
}

// through sends a datagram to the address of a Service, and returns the source that its endpoint sees.
func (w *wire) through(t *testing.T, from, to *nfttest.NS, src netip.Addr, service string) netip.Addr {
	t.Helper()
	w.port++
	s, err := nfttest.Send(nfttest.Flow{
		Proto: nfttest.UDP, From: from, To: to,
		Src: netip.AddrPortFrom(src, w.port), Dst: netip.AddrPortFrom(netip.MustParseAddr(service), destPort),
	})
	nfttest.NoError(t, err)
	return s.Seen.Addr()
}

// kindnet creates its table again at each start and each change of a Node. Its chain
// is then the last one that was registered, which runs first among equals.
func TestExemptionsHoldAgainstAChainThatIsRegisteredAgainAndAgain(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	nfttest.Require(t, "nft")
	kindnet := func(t *testing.T, ns *nfttest.NS, before string) {
		t.Helper()
		nfttest.LoadForeign(t, ns, "../../testdata/foreign/kindnet-recorded", func(s string) string { return before + s })
	}
	for _, enforced := range []bool{true, false} {
		t.Run(fmt.Sprint("enforced ", enforced), func(t *testing.T) {
			t.Parallel()
			top := nfttest.NewTopology(t)
			c := enforcing()
			if !enforced { // the control
				c.Enforce = false
			}
			apply(t, open(t, top.Node), nft.Compile(c, enforcingOptions()), nft.Contents)
			kindnet(t, top.Node, "")
			h := nfttest.StartHammer(t, top, nfttest.TargetsOfBothKinds()...)
			h.Ease()
			for range nfttest.FullRounds(8, 2000) {
				kindnet(t, top.Node, "delete table inet kindnet-ipmasq\n")
			}
			wait(t, h, 100)
			tally, err := h.Stop()
			nfttest.NoError(t, err)
			t.Log(tally)
			if tally.Leaked() > 0 || (tally.Wronged() > 0) == enforced {
				t.Error(tally)
			}
		})
	}
}

// testdata/hairpins.txt has chains of programs that let a pod reach itself through a Service or a host port without a
// mark: its own address as source would not work. The rules of CRI-O are iptables' own. testdata/services.txt has the
// endpoints of three Services: the pod itself, another pod on this node, and one elsewhere. IPVS changes the
// destination without ct status dnat, as the second one does before conntrack sees the packet.
func TestHairpinsWithoutAMarkAreLeftToOtherPrograms(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "nft", "iptables-nft-restore", "ip6tables-nft-restore")
	for name, rules := range rulesByName(t, "hairpins.txt") {
		for status, translate := range rulesByName(t, "services.txt") {
			if status != "DNAT" && name == "everything DNATed" {
				continue
			}
			t.Run(name+", "+status, func(t *testing.T) {
				t.Parallel()
				w := newWire(t)
				for _, other := range []string{"10.244.1.3", "10.9.0.9", "fd00:10:244:1::3", "fd00:9::9"} {
					nfttest.NoError(t, w.AddAddr(w.Outside, netip.MustParseAddr(other)))
				}
				nfttest.Run(t, w.Node, "", "ip", "route", "add", "10.244.1.3", "via", w.OutsideV4.String())
				nfttest.Run(t, w.Node, "", "ip", "route", "add", "fd00:10:244:1::3", "via", w.OutsideV6.String())
				if name == "CRI-O" {
					for program, pod := range map[string]string{
						"iptables-nft-restore": w.PodV4.String(), "ip6tables-nft-restore": w.PodV6.String(),
					} {
						rules := strings.ReplaceAll(testdata(t, "crio-hairpins.iptables"), "POD", pod)
						nfttest.Run(t, w.Node, rules, program, "--noflush")
					}
				}
				k := open(t, w.Node)
				received := enforcing()
				received.MasqueradeSrcCIDRs, received.MasqueradeSrcInterfaces = nil, []config.Interface{{Name: "pod*"}}
				off := enforcing()
				off.Enforce = false
				for _, c := range []config.Config{off, enforcing(), received} {
					want := nft.Compile(c, enforcingOptions())
					apply(t, k, want, everything)
					// The other program comes after us.
					nfttest.NFT(t, w.Node, "table inet services; delete table inet services; table inet services {\nchain pre {\n"+
						translate+"\n}\nchain post {\ntype nat hook postrouting priority "+rules+"\n}\n}", "-f", "-")
					w.hairpins(t, c.Enforce, name == "everything DNATed", status != "DNAT")
					inSync(t, w.Node, want) // with the pairs that the packets added
				}
			})
		}
	}
}

// hairpins opens connections of the pod to each of [services]. One to itself is translated
// by the other program, and others if that translates all and nothing is enforced.
func (w *wire) hairpins(t *testing.T, enforced, all, oneWay bool) {
	t.Helper()
	for _, service := range []string{"10.96.0.1", "10.96.0.2", "10.96.0.3", "fd00:96::1", "fd00:96::2", "fd00:96::3"} {
		f := nfttest.Flow{From: w.Pod, To: w.Outside, Dst: netip.AddrPortFrom(netip.MustParseAddr(service), destPort)}
		if oneWay { // nothing translates the replies
			f.Flags = 1 << 1 // SYN
		}
		pod, self := w.PodV4, strings.HasSuffix(service, "1")
		if f.Dst.Addr().Is6() {
			pod = w.PodV6
		}
		if self {
			f.To = w.Pod
		}
		for _, f.Proto = range []nfttest.Proto{nfttest.UDP, nfttest.TCP} {
			w.port++
			f.Src = netip.AddrPortFrom(pod, w.port)
			s, err := nfttest.Send(f)
			if err != nil || (s.Seen.Addr() != pod) != (self || !enforced && all) {
				t.Errorf("enforced %t: %s to %s seen from %s, %v", enforced, f.Proto, service, s.Seen, err)
			}
		}
	}
}

// While the set of the pairs of hairpins is full, whatever sources a pod claims to have, only hairpins wait. It forgets
// what packets added. No check reads it.
func TestFloodOfSourcesDelaysHairpinsAlone(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	nfttest.Require(t, "nft")
	w := newWire(t)
	nfttest.NFT(t, w.Node, "table inet services {\nchain pre {\n"+rulesByName(t, "services.txt")["DNAT"]+"\n}\n"+
		"chain post {\ntype nat hook postrouting priority "+rulesByName(t, "hairpins.txt")["portmap"]+"\n}\n}", "-f", "-")
	k := open(t, w.Node)
	c := enforcing()
	c.MasqueradeSrcCIDRs, c.MasqueradeSrcInterfaces = nil, []config.Interface{{Name: "pod*"}}
	want := nft.Compile(c, enforcingOptions())
	apply(t, k, want, everything)
	const empty = "flush set inet nft-masq-agent self-v4-a\n"
	var full strings.Builder
	full.WriteString(empty + "add element inet nft-masq-agent self-v4-a { ")
	for i := range nft.LearnedSize {
		fmt.Fprintf(&full, "20.0.%d.%d . 20.0.%[1]d.%[2]d timeout 1h, ", i>>8, i&255)
	}
	reachesItself := func() bool { return w.through(t, w.Pod, w.Pod, w.PodV4, "10.96.0.1") != w.PodV4 }
	for _, step := range []struct {
		name, script string
		reaches      bool // whether the pod reaches itself
	}{
		{"at first", empty, true}, {"full", full.String() + "}", false}, {"flooded", empty, true}, {"later", empty, true},
	} {
		// The kernel still counts an element that it is about to free, which a flush does not find: ENFILE.
		nfttest.Until(t, "room in the set", func() bool {
			_, err := w.Node.Output(step.script, "nft", "-f", "-")
			if err != nil && !strings.Contains(err.Error(), "Too many open files in system") {
				t.Fatal(err)
			}
			return err == nil
		})
		if step.name == "flooded" {
			spoof(t, w.Pod, nfttest.FullRounds(2_000, 70_000))
		}
		for service, sees := range map[string]netip.Addr{"10.9.0.9": w.PodV4, "203.0.113.9": w.NodeV4} {
			if seen := w.through(t, w.Pod, w.Outside, w.PodV4, service); seen != sees {
				t.Errorf("%s: %s sees %s, want %s", step.name, service, seen, sees)
			}
		}
		inSync(t, w.Node, want)
		if step.name == "flooded" {
			nfttest.Until(t, "the pod's way to itself", reachesItself)
		} else if step.reaches != reachesItself() {
			t.Fatalf("%s: the pod reaches itself: %t", step.name, !step.reaches)
		}
		if step.reaches {
			nfttest.Until(t, "an empty set", func() bool {
				set := nfttest.NFT(t, w.Node, "", "list", "set", "inet", nft.TableName, "self-v4-a")
				return !strings.Contains(set, "elements")
			})
		}
	}
}

// spoof sends packets to an exempt destination, each from another source.
func spoof(t *testing.T, from *nfttest.NS, n int) {
	t.Helper()
	k, dst := packetKind{protocol: unix.IPPROTO_UDP, ipv4: true}, netip.MustParseAddr("10.9.0.9")
	k.payload = func([]byte) []byte { return []byte{0x10, 0, 0x1e, 0x61, 0, 8, 0, 0} }
	packets := make([][]byte, n)
	for i := range packets {
		packets[i] = k.packetOf(netip.AddrFrom4([4]byte{10, 245, byte(i >> 8), byte(i)}), dst, nil)
	}
	nfttest.NoError(t, sendRaw(from, dst, packets...))
}

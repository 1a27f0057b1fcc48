package kernel

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
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
		Enforce:            &config.Position{},
	}
}

func enforcingOptions() nft.Options {
	return nft.Options{Layout: native.Layout{}, RandomFully: true, Marks: cases.Marks()}
}

// sees returns the source that a destination sees of a packet.
func (w *wire) sees(t *testing.T, src, dst string, proto nfttest.Proto) netip.Addr {
	t.Helper()
	p := cases.Packet{Src: netip.MustParseAddr(src), Dst: netip.MustParseAddr(dst), Proto: proto}
	return w.send(t, p).Seen.Addr()
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
			nfttest.LoadForeign(t, w.Node, filepath.Join("../../testdata/foreign", sample), func(s string) string { return s })
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
			k := open(t, w.Node)
			c := enforcing()
			var before []netip.Addr
			for _, enforced := range []bool{false, true} {
				if c.Enforce = nil; enforced {
					c.Enforce = &config.Position{}
				}
				apply(t, k, nft.Compile(c, enforcingOptions()), everything)
				seen := func(from, to *nfttest.NS, src netip.Addr, dst string) netip.Addr {
					w.port++
					s, err := nfttest.Send(nfttest.Flow{
						Proto: nfttest.UDP, From: from, To: to,
						Src: netip.AddrPortFrom(src, w.port), Dst: netip.MustParseAddrPort(dst),
					})
					if err != nil {
						t.Fatal(err)
					}
					return s.Seen.Addr()
				}
				got := []netip.Addr{
					seen(w.Pod, w.Pod, w.PodV4, "10.96.0.7:7777"),          // hairpin
					seen(w.Pod, w.Outside, w.PodV4, "10.96.0.8:7777"),      // ClusterIP
					seen(w.Outside, w.Pod, w.OutsideV4, "192.0.2.1:7777"),  // node port, Cluster
					seen(w.Outside, w.Pod, w.OutsideV4, "198.18.5.5:7777"), // node port, Local
				}
				if !enforced {
					before = got
					if got[0] == w.PodV4 || got[1] != w.PodV4 || got[2] == w.OutsideV4 || got[3] != w.OutsideV4 {
						t.Fatalf("without enforcement: seen %v", got)
					}
				}
				for i := range got {
					if got[i] != before[i] {
						t.Errorf("flow %d: seen %s, without enforcement %s", i, got[i], before[i])
					}
				}
			}
		})
	}
}

// sample returns another program's rules for nft from testdata/foreign.
func sample(t *testing.T, name string) string {
	t.Helper()
	rules, err := os.ReadFile(filepath.Join("../../testdata/foreign", name, "rules.nft"))
	if err != nil {
		t.Fatal(err)
	}
	return string(rules)
}

// kindnet creates its table again at each start and each change of a Node. Its chain
// is then the last one that was registered, which runs first among equals.
func TestExemptionsHoldAgainstAChainThatIsRegisteredAgainAndAgain(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	nfttest.Require(t, "nft")
	again := "delete table inet kindnet-ipmasq\n" + sample(t, "kindnet-recorded")
	for _, enforced := range []bool{true, false} {
		t.Run(fmt.Sprint("enforced ", enforced), func(t *testing.T) {
			t.Parallel()
			top := nfttest.NewTopology(t)
			c := enforcing()
			if !enforced { // the control
				c.Enforce = nil
			}
			apply(t, open(t, top.Node), nft.Compile(c, enforcingOptions()), layout.Ours)
			nfttest.NFT(t, top.Node, sample(t, "kindnet-recorded"), "-f", "-")
			h := nfttest.StartHammer(t, top, hammerTargets(nfttest.UDP, nfttest.TCP)...)
			for range nfttest.FullRounds(20, 2000) {
				nfttest.NFT(t, top.Node, again, "-f", "-")
			}
			wait(t, h, 100)
			tally, err := h.Stop()
			if err != nil {
				t.Fatal(err)
			}
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
	nfttest.Require(t, "nft", "iptables-nft-restore", "ip6tables-nft-restore")
	for name, rules := range paragraphs(t, "hairpins.txt") {
		for status, translate := range paragraphs(t, "services.txt") {
			if status != "DNAT" && name == "everything DNATed" {
				continue
			}
			t.Run(name+", "+status, func(t *testing.T) {
				t.Parallel()
				w := newWire(t)
				for _, other := range []string{"10.244.1.3", "10.9.0.9", "fd00:10:244:1::3", "fd00:9::9"} {
					if err := w.AddAddr(w.Outside, netip.MustParseAddr(other)); err != nil {
						t.Fatal(err)
					}
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
				off.Enforce = nil
				for _, c := range []config.Config{off, enforcing(), received} {
					want := nft.Compile(c, enforcingOptions())
					apply(t, k, want, everything)
					// The other program comes after us.
					nfttest.NFT(t, w.Node, "table inet services; delete table inet services; table inet services {\nchain pre {\n"+
						translate+"\n}\nchain post {\ntype nat hook postrouting priority "+rules+"\n}\n}", "-f", "-")
					w.hairpins(t, c.Enforce != nil, name == "everything DNATed", status != "DNAT")
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

// Whatever sources a pod claims to have, only hairpins wait, for a second, and only while
// the set is full. No check reads it.
func TestFloodOfSourcesDelaysHairpinsAlone(t *testing.T) {
	nfttest.SkipIfShort(t)
	t.Parallel()
	nfttest.Require(t, "nft")
	w := newWire(t)
	nfttest.NFT(t, w.Node, "table inet services {\nchain pre {\n"+paragraphs(t, "services.txt")["DNAT"]+"\n}\n"+
		"chain post {\ntype nat hook postrouting priority "+paragraphs(t, "hairpins.txt")["portmap"]+"\n}\n}", "-f", "-")
	k := open(t, w.Node)
	c := enforcing()
	c.MasqueradeSrcCIDRs, c.MasqueradeSrcInterfaces = nil, []config.Interface{{Name: "pod*"}}
	want := nft.Compile(c, enforcingOptions())
	apply(t, k, want, everything)
	reachesItself := func() bool {
		t.Helper()
		w.port++
		s, err := nfttest.Send(nfttest.Flow{
			Proto: nfttest.UDP, From: w.Pod, To: w.Pod, Src: netip.AddrPortFrom(w.PodV4, w.port),
			Dst: netip.MustParseAddrPort("10.96.0.1:7777"),
		})
		if err != nil {
			t.Fatal(err)
		}
		return s.Seen.Addr() != w.PodV4
	}
	others := func(when string) {
		t.Helper()
		if seen := w.sees(t, "10.244.1.2", "10.9.0.9", nfttest.UDP); seen != w.PodV4 {
			t.Errorf("%s: an exempt destination sees %s", when, seen)
		}
		if seen := w.sees(t, "10.244.1.2", "203.0.113.9", nfttest.UDP); seen != w.NodeV4 {
			t.Errorf("%s: another destination sees %s", when, seen)
		}
		inSync(t, w.Node, want)
	}
	if others("at first"); !reachesItself() {
		t.Error("at first: the pod does not reach itself")
	}
	var full strings.Builder
	full.WriteString("add element inet nft-masq-agent self-v4-a { ")
	for i := range nft.LearnedSize {
		a := netip.AddrFrom4([4]byte{20, 0, byte(i >> 8), byte(i)})
		fmt.Fprintf(&full, "%s . %[1]s timeout 1h, ", a)
	}
	nfttest.NFT(t, w.Node, "flush set inet nft-masq-agent self-v4-a\n"+full.String()+"}", "-f", "-")
	if others("full"); reachesItself() {
		t.Error("full: the pod reaches itself, so the set is not full")
	}
	nfttest.NFT(t, w.Node, "flush set inet nft-masq-agent self-v4-a", "-f", "-")
	spoof(t, w.Pod, nfttest.FullRounds(2_000, 70_000))
	others("flooded")
	for end := time.Now().Add(nfttest.Patient(time.Minute)); !reachesItself(); {
		if time.Now().After(end) {
			t.Fatal("flooded: the pod does not reach itself any more")
		}
	}
	for end := time.Now().Add(nfttest.Patient(time.Minute)); strings.Contains(
		nfttest.NFT(t, w.Node, "", "list", "set", "inet", nft.TableName, "self-v4-a"), "elements"); {
		if time.Now().After(end) {
			t.Fatal("the set does not forget")
		}
	}
	others("later")
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
	if err := sendRaw(from, dst, packets...); err != nil {
		t.Fatal(err)
	}
}

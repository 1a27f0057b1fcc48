package foreign_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/nft/nfttest"
)

func TestConflictsFollowThePathOfAPacket(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	const nothing = ""
	tests := []struct{ name, rules, want string }{
		{"masquerades all", "masquerade", "10.0.0.0/8 fd00::/8"},
		{"rewrites to a fixed address", "snat ip to 192.0.2.1", "10.0.0.0/8"},
		{"of one family", "meta nfproto ipv4 masquerade", "10.0.0.0/8"},
		{"of one family, by protocol", "meta protocol ip6 masquerade", "fd00::/8"},
		{"to other destinations", "ip daddr 192.0.2.0/24 masquerade", nothing},
		{"to a part of the exempt", "ip daddr 10.1.0.0/16 masquerade", "10.0.0.0/8"},
		{"to a range", "ip daddr 9.0.0.0-10.0.0.0 masquerade", "10.0.0.0/8"},
		{"to a range next to it", "ip daddr 9.0.0.0-9.255.255.255 masquerade", nothing},
		{"to all but a part", "ip daddr != 10.1.0.0/16 masquerade", "10.0.0.0/8"},
		{"to all but the exempt", "ip daddr != 10.0.0.0/8 masquerade", nothing},
		{"the exempt returned", "ip daddr 10.0.0.0/8 return\nip6 daddr fd00::/8 accept\nmasquerade", nothing},
		{
			"the exempt returned in parts",
			"ip daddr 10.0.0.0/9 return\nip daddr 10.128.0.0/9 accept\nmeta nfproto ipv4 masquerade", nothing,
		},
		{"a part returned", "ip daddr 10.0.0.0/9 return\nmeta nfproto ipv4 masquerade", "10.0.0.0/8"},
		{
			"returned under a condition", "ip daddr 10.0.0.0/8 ct state established return\nmeta nfproto ipv4 masquerade",
			"10.0.0.0/8",
		},
		{"in a set that is returned", "ip daddr @nets return\nmeta nfproto ipv4 masquerade", nothing},
		{
			"in a literal set that is returned", "ip daddr { 10.0.0.0/8, 192.168.0.0/16 } return\nmeta nfproto ipv4 masquerade",
			nothing,
		},
		{"in a set of addresses", "ip daddr @hosts masquerade", "10.0.0.0/8"},
		{"not in a set", "ip daddr != @nets masquerade", nothing},
		{"in a set that changes at run time", "ip daddr @passing return\nmeta nfproto ipv4 masquerade", "10.0.0.0/8"},
		{"after everything has returned", "return\nmasquerade", nothing},
		{"after everything was accepted", "counter accept\nmasquerade", nothing},
		{"after a jump from which nothing comes back", "jump accepting\nmasquerade", nothing},
		{"after a jump that accepts the exempt", "jump exempting\nmasquerade", nothing},
		{"after a jump that accepts a remainder", "jump remaining\nmeta nfproto ipv4 masquerade", "10.0.0.0/8"},
		{"after a jump that returns", "jump returning\nmeta nfproto ipv4 masquerade", "10.0.0.0/8"},
		{"after a goto", "goto returning\nmasquerade", nothing},
		{"in a chain that a goto leads to", "ip daddr 10.0.0.0/8 goto masking", "10.0.0.0/8"},
		{"in a chain that a goto to others leads to", "ip daddr 192.0.2.0/24 goto masking", nothing},
		{"in a chain that a map leads to", "oifname vmap @jumps", "10.0.0.0/8 fd00::/8 where oifname vmap @jumps"},
		{"in a chain that a map leads to from others", "ip saddr vmap @sources", nothing},
		{
			"in a chain that one of two maps leads to", "ip daddr 192.0.2.0/24 oifname vmap @jumps\nip saddr vmap @sources",
			nothing,
		},
		{
			"in a chain that a map leads to and a jump", "ip saddr 192.0.2.1 jump masking\nip saddr 192.0.2.2 jump masking",
			"10.0.0.0/8 from 192.0.2.1 or 192.0.2.2",
		},
		{
			"from a source", "ip saddr 172.17.0.0/16 oifname != \"docker0\" masquerade",
			"10.0.0.0/8 from 172.17.0.0/16 where oifname != \"docker0\"",
		},
		{"from all but a source", "ip saddr != 10.0.0.0/8 masquerade", "10.0.0.0/8 from not 10.0.0.0/8"},
		{"from a source that a jump excludes", "ip saddr 10.1.0.0/16 jump other-source", nothing},
		{"from a source that has returned", "ip saddr 10.0.0.0/8 return\nip saddr 10.1.0.0/16 masquerade", nothing},
		{
			"from a source to what has returned",
			"ip saddr 10.0.0.0/8 ip daddr 10.0.0.0/8 return\nip saddr 10.1.0.0/16 masquerade", nothing,
		},
		{
			"from another source to it", "ip saddr 10.0.0.0/8 ip daddr 10.0.0.0/8 return\nip saddr 192.0.2.1 masquerade",
			"10.0.0.0/8 from 192.0.2.1",
		},
		{
			"from all sources that have returned",
			"ip saddr 10.0.0.0/8 ip daddr 10.0.0.0/8 return\nip saddr != 10.0.0.0/8 ip daddr 10.0.0.0/8 return\nmeta nfproto " +
				"ipv4 masquerade", nothing,
		},
		{"from an address to itself", "ip saddr 10.0.0.2 ip daddr 10.0.0.2 masquerade", nothing},
		{"from the loopback addresses", "ip saddr 127.0.0.0/8 masquerade", nothing},
		{"from this node", "fib saddr type local meta nfproto ipv4 masquerade", "10.0.0.0/8 from this node"},
		{"marked by kube-proxy", "mark and 0x4000 == 0x4000 masquerade", nothing},
		{"when the others return", "mark and 0x4000 == 0 return\nmasquerade", nothing},
		{"when the others return, as iptables writes it", "mark and 0x4000 != 0x4000 return\nmasquerade", nothing},
		{
			"marked by another", "mark and 0xff0000 == 0x40000 meta nfproto ipv4 masquerade",
			"10.0.0.0/8 where meta mark & 0xff0000 == 0x40000",
		},
		{"not marked", "mark and 0x4000 == 0 meta nfproto ipv4 masquerade", "10.0.0.0/8"},
		{"out of the loopback device", "oifname \"lo\" masquerade", nothing},
		{"received on the loopback device", `iifname "lo" masquerade`, `10.0.0.0/8 fd00::/8 where iifname "lo"`},
		{"when everything else returns", "oifname != \"lo\" return\nmasquerade", nothing},
		{"not out of the loopback device", "oif != \"lo\" meta nfproto ipv4 masquerade", "10.0.0.0/8"},
		{"to this node", "fib daddr type local masquerade", nothing},
		{"not to this node", "fib daddr type != local meta nfproto ipv4 masquerade", "10.0.0.0/8"},
		{
			"to this node or another", "fib daddr type { local, unicast } meta nfproto ipv4 masquerade",
			"10.0.0.0/8 where fib daddr type @__set0",
		},
		{"to another", "fib daddr type unicast meta nfproto ipv4 masquerade", "10.0.0.0/8 where fib daddr type unicast"},
		{"from another", "fib saddr type != local meta nfproto ipv4 masquerade", "10.0.0.0/8 from not this node"},
		{"of a new connection", "ct state new meta nfproto ipv4 masquerade", "10.0.0.0/8 where ct state new"},
		{
			"whose destination was translated", "ct status dnat meta nfproto ipv4 masquerade",
			"10.0.0.0/8 where ct status dnat",
		},
		{"out of a device that is not lo", `oifname "eth0" meta nfproto ipv4 masquerade`, `10.0.0.0/8 where oifname "eth0"`},
		{"out of devices of which one is lo", `oifname { "lo", "eth0" } meta nfproto ipv4 masquerade`, "10.0.0.0/8 where oifname @__set0"},
		{"of no family that counts", "meta protocol arp masquerade", nothing},
		{
			"of either family", "meta nfproto { ipv4, ipv6 } masquerade",
			"10.0.0.0/8 fd00::/8 where meta nfproto @__set0",
		},
		{"of all but a family", "meta nfproto != ipv6 masquerade", "10.0.0.0/8"},
		{"of a range of marks", "meta mark > 5 meta nfproto ipv4 masquerade", "10.0.0.0/8 where meta mark > 5"},
		{"of a mark that was set", "meta mark set 5\nmeta mark 5 meta nfproto ipv4 masquerade", "10.0.0.0/8"},
		{"of another than was set", "meta mark set 5\nmeta mark 6 meta nfproto ipv4 masquerade", nothing},
		{
			"from half of the addresses", "ip saddr 0.0.0.0/1 return\nip saddr 128.0.0.0/1 masquerade",
			"10.0.0.0/8 from 128.0.0.0/1",
		},
		{
			"to half of those from half",
			"ip saddr 0.0.0.0/1 ip daddr 10.0.0.0/9 return\nip saddr 0.0.0.0/2 ip daddr 10.0.0.0/9 masquerade", nothing,
		},
		{"after everything was translated", "masquerade\nmasquerade", "10.0.0.0/8 fd00::/8"},
		{
			"to the other half", "ip saddr 0.0.0.0/1 ip daddr 10.0.0.0/9 return\nip saddr 0.0.0.0/2 masquerade",
			"10.0.0.0/8 from 0.0.0.0/2",
		},
		{"limited", "limit rate 5/second meta nfproto ipv4 masquerade", "10.0.0.0/8 where limit rate 5/second"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			ns, c := dialNS(t)
			nfttest.NFT(t, ns, fmt.Sprintf(`table inet t {
				set nets { type ipv4_addr; flags interval; elements = { 10.0.0.0/8 }; }
				set hosts { type ipv4_addr; elements = { 10.0.0.1, 192.0.2.1 }; }
				set passing { type ipv4_addr; flags timeout; timeout 1h; elements = { 10.0.0.1 }; }
				chain accepting { accept
				}
				chain exempting {
					ip daddr 10.0.0.0/8 accept
					ip6 daddr fd00::/8 accept
				}
				chain remaining {
					ip daddr 10.1.0.0/16 return
					meta mark 7 return
					accept
				}
				chain returning { return
				}
				chain masking { masquerade
				}
				chain other-source { ip saddr 10.2.0.0/16 masquerade
				}
				map jumps { type ifname : verdict; elements = { "a" : jump masking, "b" : jump returning }; }
				map sources { type ipv4_addr : verdict; elements = { 10.1.0.1 : jump other-source, 10.2.0.1 : jump returning }; }
				chain post { type nat hook postrouting priority 100;
					%s
				}
			}`, test.rules), "-f", "-")
			var got []string
			for _, c := range conflictsOf(read(t, c), prefixes(t, "10.0.0.0/8 fd00::/8")) {
				got = append(got, strings.ReplaceAll(strings.TrimPrefix(c.Why(), "rewrites the source of connections to "), ", ",
					" "))
			}
			if diff := cmp.Diff(test.want, strings.Join(got, "; ")); diff != "" {
				t.Errorf("conflicts (-want +got):\n%s", diff)
			}
		})
	}
}

func TestOnlyChainsThatPacketsLeaveByAreRead(t *testing.T) {
	nfttest.Require(t, "nft")
	ns, c := dialNS(t)
	nfttest.NFT(t, ns, `
		table ip asleep {
			flags dormant
			chain post { type nat hook postrouting priority 100; masquerade
			}
		}
		table ip t {
			chain in { type nat hook input priority 100; snat to 192.0.2.1
			}
			chain filter { type filter hook forward priority 0; jump unread
			}
			chain pre { type filter hook prerouting priority -150; jump unread
			}
			chain unread { counter
			}
			chain orphan { masquerade
			}
			chain post { type nat hook postrouting priority 100; jump reached
			}
			chain reached { counter
			}
		}
		table ip other { chain reached { masquerade
			}
		}
		table ip6 t { chain reached { masquerade
			}
		}`, "-f", "-")
	s := read(t, c)
	var got []string
	for _, c := range s.Chains {
		got = append(got, fmt.Sprint(c.Family, " ", c.Table, " ", c.Name))
	}
	if diff := cmp.Diff([]string{"ip t post", "ip t reached"}, got); diff != "" {
		t.Errorf("read (-want +got):\n%s", diff)
	}
	if found := conflictsOf(s, prefixes(t, defaultExempt)); len(found) > 0 {
		t.Errorf("found %v", found)
	}
}

func TestManyPathsToOneRuleAreOneConflict(t *testing.T) {
	nfttest.Require(t, "nft")
	for ways, want := range map[int]string{
		1:  "rewrites the source of connections to 10.0.0.0/8 from 192.0.2.0 where oifname \"eth0\"",
		2:  "rewrites the source of connections to 10.0.0.0/8 from 192.0.2.0 or 192.0.2.1 where oifname \"eth0\"",
		50: "rewrites the source of connections to 10.0.0.0/8 where oifname \"eth0\"",
	} {
		ns, c := dialNS(t)
		var jumps strings.Builder
		for i := range ways {
			fmt.Fprintf(&jumps, "ip saddr 192.0.2.%d meta l4proto %d jump masking\n", i, i+1)
		}
		nfttest.NFT(t, ns, fmt.Sprintf(`table ip t {
			chain masking { oifname "eth0" masquerade
			}
			chain post { type nat hook postrouting priority -5;
				%s
			}
		}`, jumps.String()), "-f", "-")
		found := conflictsOf(read(t, c), prefixes(t, "10.0.0.0/8"))
		if len(found) != 1 {
			t.Fatalf("%d ways: found %v", ways, found)
		}
		if ways == 1 {
			want = strings.Replace(want, "where ", "where meta l4proto icmp, ", 1)
		}
		if got := found[0].Why(); got != want {
			t.Errorf("%d ways: %q, want %q", ways, got, want)
		}
		if found[0].Priority != -5 || found[0].Base != "post" {
			t.Errorf("%d ways: %+v", ways, found[0])
		}
	}
}

func TestConflictsNameExemptPrefixesAsConfigured(t *testing.T) {
	nfttest.Require(t, "nft")
	ns, c := dialNS(t)
	nfttest.NFT(t, ns, "add table ip t\nadd chain ip t p { type nat hook postrouting priority 100; }\nadd rule ip t p "+
		"masquerade\n", "-f", "-")
	s := read(t, c)
	exempt := "10.0.0.0/8 10.1.0.0/16 10.0.0.0/8 1.0.0.0/8 2.0.0.0/8 3.0.0.0/8 4.0.0.0/8 5.0.0.0/8 6.0.0.0/8 7.0.0.0/8 " +
		"8.0.0.0/8 ::/0"
	want := "rewrites the source of connections to 1.0.0.0/8, 2.0.0.0/8, 3.0.0.0/8, 4.0.0.0/8, 5.0.0.0/8, 6.0.0.0/8, " +
		"7.0.0.0/8, 8.0.0.0/8, others"
	found := conflictsOf(s, prefixes(t, exempt))
	if len(found) != 1 || found[0].Why() != want || found[0].Table() != "ip t" || found[0].Chain() != "p" {
		t.Errorf("got %v\nwant %s", found, want)
	}
	if found := conflictsOf(s, prefixes(t, "::/0")); len(found) > 0 {
		t.Errorf("found %v for IPv6", found)
	}
	if found := conflictsOf(s, nil); len(found) > 0 {
		t.Errorf("found %v although nothing is exempt", found)
	}
}

// The rules of many chains of a table are listed at once.
func TestManyChainsAreRead(t *testing.T) {
	nfttest.Require(t, "nft")
	ns, c := dialNS(t)
	var chains, jumps, long strings.Builder
	for i := range 200 {
		rules := fmt.Sprintf("ip saddr 10.244.0.%d masquerade\nip saddr 10.245.0.%d masquerade\n", i, i)
		if i%10 == 0 {
			rules = ""
		}
		fmt.Fprintf(&chains, "chain c%d {\n%s}\n", i, rules)
		fmt.Fprintf(&jumps, "meta l4proto tcp jump c%d\n", i)
		fmt.Fprintf(&long, "chain other%d { masquerade\n }\n", i)
	}
	nfttest.NFT(t, ns, fmt.Sprintf("table ip t {\n%s\n%s\nchain post { type nat hook postrouting priority 100\n%s\n}\n}\n",
		chains.String(), long.String(), jumps.String()), "-f", "-")
	s := read(t, c)
	if found := conflictsOf(s, prefixes(t, "10.0.0.0/8")); len(found) != 360 || len(s.Chains) != 201 || s.Unread > 0 {
		t.Errorf("%d conflicts in %d chains, %d rules not read", len(found), len(s.Chains), s.Unread)
	}
}

// All packets are followed at once, and only some of them get the mark.
func TestMarkOfSomePacketsIsUnknownForTheOthers(t *testing.T) {
	nfttest.Require(t, "nft")
	for rules, conflict := range map[string]bool{
		"meta mark set 1":                              false, // the control: of all
		"jump marking":                                 false,
		"ip saddr 10.1.0.0/16 meta mark set 1":         true,
		"ip daddr 10.1.0.0/16 meta mark set 1":         true,
		"ip daddr != 10.1.0.0/16 meta mark set 1":      true,
		"ip daddr 10.1.0.0/16 jump marking":            true,
		"ip daddr { 10.1.0.1, 10.1.0.2 } jump marking": true,
		"ip daddr vmap { 10.1.0.1 : jump marking }":    true,
		"tcp dport 53 meta mark set 1":                 true,
	} {
		ns, c := dialNS(t)
		nfttest.NFT(t, ns, fmt.Sprintf(`table ip t {
			chain marking { meta mark set 1; }
			chain post { type nat hook postrouting priority 0;
				%s
				meta mark != 1 masquerade
			}
		}`, rules), "-f", "-")
		if found := conflictsOf(read(t, c), prefixes(t, "10.0.0.0/8")); len(found) > 0 != conflict {
			t.Errorf("%s: found %v, want any: %t", rules, found, conflict)
		}
	}
}

// A rule may not match all addresses of its set, or more than the set names.
func TestSetsWhoseElementsMayNotMatchAreUnknown(t *testing.T) {
	nfttest.Require(t, "nft")
	for _, tt := range []struct {
		set, rule string
		conflict  bool
	}{
		{"flags interval; elements = { 0.0.0.0/0 }", "ip daddr @s accept", false}, // the control
		{"flags interval; elements = { 10.0.0.0/9, 10.128.0.0-10.255.255.255 }", "ip daddr @s accept", false},
		{"flags interval; elements = { 10.0.0.0/9 }", "ip daddr @s accept", true},
		{"flags interval; elements = { 11.0.0.0/8 }", "ip daddr != @s accept", false},
		{"elements = { 10.0.0.0 }", "ip daddr @s accept", true},
		{"flags interval; quota 10 bytes; elements = { 0.0.0.0/0 }", "ip daddr @s accept", true},
		{"flags interval; limit rate 1/second; elements = { 0.0.0.0/0 }", "ip daddr @s accept", true},
		{"elements = { 11.0.0.0, * }", "ip daddr != @s accept", true},
	} {
		if strings.Contains(tt.set, "*") && nfttest.KernelBefore(t, 5, 13) {
			continue // sets have no *
		}
		ns, c := dialNS(t)
		nfttest.NFT(t, ns, fmt.Sprintf(`table ip t {
			set s { type ipv4_addr; %s; }
			chain post { type nat hook postrouting priority 0;
				%s
				masquerade
			}
		}`, tt.set, tt.rule), "-f", "-")
		if found := conflictsOf(read(t, c), prefixes(t, "10.0.0.0/8")); len(found) > 0 != tt.conflict {
			t.Errorf("%s, %s: found %v, want any: %t", tt.set, tt.rule, found, tt.conflict)
		}
	}
}

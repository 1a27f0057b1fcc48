package answer

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/cmd/nft-masq-agent/internal/health"
	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/xtables"
)

// healthy are the facts of a node of which nothing is wrong.
func healthy(t *testing.T, text string) *StatusFacts {
	t.Helper()
	p := testPolicy(t, text, "198.51.100.7")
	return &StatusFacts{
		Head:   cli.NewHead("status"),
		Config: Config{Path: "/its/config", Hash: p.Hash(), Accepted: true, Files: []string{"/its/config"}, Mode: "nftables"},
		Agent:  &running.Report{PID: 7}, Policy: p, InForce: true,
		Kernel: Kernel{InSync: true, Mode: "nftables", Hash: p.Hash()},
		Health: health.Facts{
			Pods:  []routes.Pod{{Address: netip.MustParseAddr("10.244.1.7"), Interface: "veth1"}},
			Links: []routes.Interface{{Name: "lo"}, {Name: "veth1"}, {Name: "eth0"}},
		},
		Evidence: &conntrack.Evidence{
			Counts: []conntrack.Count{{Agrees: 3}}, Sample: conntrack.Sample{Examined: 3, Tracked: 3},
		},
	}
}

// Each problem stands in the first line, and leads to exit code 1; a note does none of this.
func TestEachProblemFollowsFromTheFacts(t *testing.T) {
	anything := judge.Entry{Verdict: nft.Masqueraded}
	for _, tt := range []struct {
		name, config string
		facts        func(f *StatusFacts)
		id           string // "" if nothing is wrong
		first        string // the first line
		details      string // a part of the lines below it
		note         string // the ID of a warning or a note
	}{
		{name: "a healthy node", first: "in sync: "},
		{name: "nothing is compared", first: "in sync: ", facts: func(f *StatusFacts) {
			f.Evidence = nil
		}},
		{name: "no connection of a pod", first: "in sync: ", facts: func(f *StatusFacts) {
			f.Evidence = &conntrack.Evidence{}
		}},
		{
			name: "connections cannot be read", first: "in sync: ", note: health.Unchecked,
			facts: func(f *StatusFacts) {
				f.Evidence = nil
				f.Health.CannotRead("connections", errors.New("no module"))
			},
		},
		{name: "no pods are known", first: "in sync: ", facts: func(f *StatusFacts) {
			f.Health.Pods = nil
		}},
		{name: "stale connections", first: "in sync: ", note: "stale-connections", facts: func(f *StatusFacts) {
			f.Evidence.Counts[0].Stale = 2
		}},
		{name: "undated connections", first: "in sync: ", note: "undated-connections", facts: func(f *StatusFacts) {
			f.Evidence.Counts[0].Undated = 2
		}},
		{
			name: "everything is exempt", config: "nonMasqueradeCIDRs: [0.0.0.0/0]\n", first: "in sync: ",
			note: health.Everything,
		},
		{
			name: "the pods are not exempt", config: "nonMasqueradeCIDRs: [192.168.0.0/16]\n", first: "in sync: ",
			note: health.PodsNotExempt,
		},
		{name: "legacy filter", first: "in sync: ", facts: func(f *StatusFacts) {
			f.Health.Legacy = []xtables.LegacyTable{{Family: nfnetlink.IPv4, Table: "filter"}}
		}},
		{name: "something cannot be read", first: "in sync: ", note: health.Unchecked, facts: func(f *StatusFacts) {
			f.Health.CannotRead("the interfaces", unix.EPERM)
		}},
		{name: "no agent", id: "no-agent", first: "no agent runs on this node", facts: func(f *StatusFacts) {
			f.Agent = nil
		}},
		{
			name: "an agent that says that it is stuck", id: "agent-stuck",
			first: "the agent is stuck (pid 7): in a read", facts: func(f *StatusFacts) { f.Agent.Alive = "in a read" },
		},
		{
			name: "the kernel rejects", id: "rules-not-written", first: "the agent cannot write its rules",
			details: "no nf_nat", facts: func(f *StatusFacts) { f.Agent.Failure = "no nf_nat" },
		},
		{
			name: "rules are delayed", id: "rules-delayed", first: "others write all the time",
			facts: func(f *StatusFacts) {
				f.Agent.Failure = "others write all the time"
				f.Agent.Delayed = true
			},
		},
		{
			name: "two agents", id: "second-agent",
			first: "2 agents run here (pid 7, pid 9) and overwrite each other: stop all but one",
			facts: func(f *StatusFacts) { f.Agent.SecondAgent = 9 },
		},
		{
			name: "rules are restored again and again", id: "rules-restored",
			first: "another program keeps changing the rules", facts: func(f *StatusFacts) {
				f.Agent.Problems = config.Problems{{ID: "rules-restored", Msg: "another program keeps changing the rules"}}
			},
		},
		{
			name: "the config vanished", id: "config-vanished", first: "the config is gone",
			facts: func(f *StatusFacts) {
				f.Agent.Vanished = "the config is gone"
			},
		},
		{
			name: "a rejected config", id: "config-rejected",
			first: "config rejected; an earlier config (12345678) is installed, mode nftables", details: "fix /its/config:3:5",
			facts: func(f *StatusFacts) {
				f.Config.Accepted = false
				place := config.Position{File: "/its/config", Line: 3, Col: 5}
				f.Files = config.Problems{{ID: "host-bits", Pos: place, Msg: "has host bits"}}
				f.Kernel = Kernel{Hash: "12345678", Mode: "nftables"}
			},
		},
		{
			name: "a rejected config and no agent", id: "config-rejected", details: "fix /its/config\n",
			first: "config rejected; an earlier config (12345678) is installed, mode nftables", facts: func(f *StatusFacts) {
				f.Config.Accepted = false
				f.Kernel = Kernel{Hash: "12345678", Mode: "nftables"}
				f.Agent = nil
			},
		},
		{
			name: "a rejected config, as older agents read it", id: "config-rejected",
			first: "config rejected; the older agents' reading of it (12345678) is installed", facts: func(f *StatusFacts) {
				f.Config.Accepted = false
				place := config.Position{File: "/its/config", Line: 3, Col: 5}
				f.Files = config.Problems{{ID: "host-bits", Pos: place, Msg: "has host bits"}}
				f.Kernel = Kernel{Hash: "12345678", Mode: "nftables"}
				f.Agent.Source = "lenient"
			},
		},
		{
			name: "a rejected config at the start", id: "config-rejected",
			first: "config rejected; the built-in defaults (12345678) are installed", facts: func(f *StatusFacts) {
				f.Config.Accepted = false
				f.Files = config.Problems{{ID: "config", Msg: "it cannot be read"}}
				f.Kernel = Kernel{Hash: "12345678", Mode: "nftables"}
				f.Agent.Source = "defaults"
			},
		},
		{
			name: "a rejected config next to an older agent", id: "config-rejected",
			first: "config rejected; the rules of an iptables-based agent are active, none of our rules are installed",
			facts: func(f *StatusFacts) {
				f.Config.Accepted = false
				f.Files = config.Problems{{ID: "config", Msg: "it cannot be read"}}
				f.Kernel = Kernel{}
				f.Older = []xtables.OlderChain{{Chain: nfnetlink.Chain{Family: nfnetlink.IPv4, Table: "nat", Name: "IP-MASQ"}}}
			},
		},
		{
			name: "a rejected config and no rules", id: "config-rejected",
			first: "config rejected; none of our rules are installed", facts: func(f *StatusFacts) {
				f.Config.Accepted = false
				f.Files = config.Problems{{ID: "config", Msg: "it cannot be read"}}
				f.Kernel = Kernel{}
			},
		},
		{
			name: "another policy is installed", id: "out-of-sync",
			first:   "out of sync: installed: 12345678, mode nftables",
			details: "the agent enforces that: this command has another config", facts: func(f *StatusFacts) {
				f.Kernel = Kernel{Hash: "12345678", Mode: "nftables"}
			},
		},
		{
			name: "the same policy in another mode", id: "out-of-sync", first: "out of sync: installed: ",
			facts: func(f *StatusFacts) {
				f.Kernel.InSync = false
				f.Kernel.Mode = "iptables-nft"
			},
		},
		{name: "changed rules", id: "out-of-sync", facts: func(f *StatusFacts) {
			f.Kernel.InSync = false
			f.Kernel.Hash = f.Config.Hash
		}, first: "out of sync: ", details: "nft monitor shows which program changes them"},
		{
			name: "rules of an older agent", id: "older-agent",
			first: "rules of an iptables-based agent are also active", details: "stop that agent", facts: func(f *StatusFacts) {
				f.Older = []xtables.OlderChain{{Chain: nfnetlink.Chain{Family: nfnetlink.IPv4, Table: "nat", Name: "IP-MASQ"}}}
			},
		},
		{
			name: "rules of an older agent that are taken over", id: "older-agent",
			first:   "rules of an iptables-based agent are also active",
			details: "stop that agent: this one then removes its rules", facts: func(f *StatusFacts) {
				f.Older = []xtables.OlderChain{{Chain: nfnetlink.Chain{Family: nfnetlink.IPv4, Table: "nat", Name: "IP-MASQ"}}}
				f.TakeOver = true
			},
		},
		{
			name: "another policy, and no agent", id: "out-of-sync", details: "start it, or check that it runs with these flags",
			first: "out of sync: installed: 12345678, mode nftables", facts: func(f *StatusFacts) {
				f.Kernel = Kernel{Hash: "12345678", Mode: "nftables"}
				f.Agent = nil
			},
		},
		{
			name: "no rules", id: "out-of-sync", details: "see its log", first: "out of sync: none of our rules are installed",
			facts: func(f *StatusFacts) {
				f.Kernel = Kernel{}
				f.InForce = false
			},
		},
		{
			name: "the policy in force is not known", first: "in sync: ", note: "stale-unknown", facts: func(f *StatusFacts) {
				f.InForce = false
				f.Unknown = "The rules are not those of a config"
			},
		},
		{
			name: "a sample", first: "in sync: ", note: "sampled", facts: func(f *StatusFacts) { f.Evidence.Partial = true },
		},
		{
			name: "overruled connections", id: "connections-overruled",
			first:   "2 connections that began under this policy contradict it: another program decides",
			details: "nft-masq-agent explain 203.0.113.9 --from 10.244.1.7 --trace names the rule", facts: func(f *StatusFacts) {
				f.Evidence.Counts = []conntrack.Count{{
					Entry: anything, Overruled: 2, Examples: []conntrack.Example{exampleOf("192.0.2.77", conntrack.AgeOverruled)},
				}}
			},
		},
		{
			name: "overruled connections of two entries", id: "connections-overruled",
			first:   "3 connections that began under this policy contradict it: another program decides",
			details: "is seen as 192.0.2.77:40000: anything else says otherwise", facts: func(f *StatusFacts) {
				f.Evidence.Counts = []conntrack.Count{
					{Entry: anything, Overruled: 2, Stale: 1, Examples: []conntrack.Example{
						exampleOf("192.0.2.76", conntrack.AgeStale), exampleOf("192.0.2.77", conntrack.AgeOverruled),
					}},
					{Overruled: 1, Examples: []conntrack.Example{exampleOf("192.0.2.78", conntrack.AgeOverruled)}},
				}
			},
		},
		{
			name: "overruled connections that have ended", id: "connections-overruled",
			first: "2 connections that began under this policy contradict it: another program decides, or did: none is left, " +
				"and this is said for ten minutes", facts: func(f *StatusFacts) {
				f.Recent = []conntrack.Count{{Entry: anything, Overruled: 2}}
			},
		},
		{
			name: "a destination does not answer", id: "destination-unanswered",
			first:   "10.16.2.27 answered 0 of 20 connections that show the pod's IP",
			details: "force 10.16.2.27/32", facts: func(f *StatusFacts) {
				f.Evidence.Unanswered = []conntrack.Unanswered{{To: netip.MustParseAddr("10.16.2.27"), Silent: 20}}
			},
		},
		{
			name: "nothing that is masqueraded is answered", id: "uplink-silent",
			first: "1 of 20 masqueraded IPv4 connections were answered", facts: func(f *StatusFacts) {
				f.Evidence.Unanswered = []conntrack.Unanswered{{Entry: anything, Silent: 19, Answered: 1}}
			},
		},
		{
			name: "an interface list matches nothing", id: health.InterfaceList,
			config: "masqueradeSrcInterfaces: [cali*]\n",
			first:  "nothing is masqueraded: no packet passes an interface of masqueradeSrcInterfaces (cali*)",
		},
		{
			name: "packets of pods are received elsewhere", id: health.NoPods,
			config:  "masqueradeSrcInterfaces: [lo]\n",
			first:   "nothing is masqueraded: masqueradeSrcInterfaces excludes each of this node's 1 IPv4 pods",
			details: "such as 10.244.1.7, received on veth1: see config:1:27",
		},
		{
			name: "pods leave by no such interface", id: health.InterfaceList,
			config: "masqueradeOutInterfaces: [wg0]\n", first: "nothing is masqueraded: no packet passes an interface of",
		},
		{
			name: "the sources exclude every pod", id: health.NoPods,
			config: "masqueradeSrcCIDRs: [10.245.0.0/16]\n",
			first:  "nothing is masqueraded: masqueradeSrcCIDRs excludes each of this node's 1 IPv4 pods",
		},
		{
			name: "legacy nat", id: health.LegacyTables,
			first: "rules in legacy ip_tables (ip nat) translate, too", details: "iptables-legacy -t nat -S shows them",
			facts: func(f *StatusFacts) {
				f.Health.Legacy = []xtables.LegacyTable{{Family: nfnetlink.IPv4, Table: "nat"}}
			},
		},
		{
			name: "legacy nat of an older agent", id: health.LegacyTables,
			first: "rules of an iptables-based agent in legacy ip_tables (ip nat) translate, too",
			facts: func(f *StatusFacts) {
				f.Health.Legacy = []xtables.LegacyTable{{Family: nfnetlink.IPv4, Table: "nat", Older: true}}
			},
		},
		{
			name: "forwarding is off", id: health.Forwarding,
			first: "no pod reaches another host: this node forwards no IPv4 packets of veth1", details: "sysctl -w it",
			facts: func(f *StatusFacts) {
				f.Health.NotForwarding = []health.NotForwarded{{Interface: "veth1", Remedy: "sysctl -w it"}}
			},
		},
		{
			name: "a single file", id: health.SingleFile,
			first: "the config does not follow its source when that is replaced", facts: func(f *StatusFacts) {
				f.Health.Single = true
			},
		},
		{
			name: "more than is kept", first: "in sync: ", note: "evidence-full",
			facts: func(f *StatusFacts) { f.Evidence.Incomplete = true },
		},
		{
			name: "conntrack is full", id: health.Conntrack,
			first: "new connections fail, or will: 90 of 100 connections are tracked", facts: func(f *StatusFacts) {
				f.Health.Tracked = conntrack.Stats{Entries: 90, Limit: 100}
			},
		},
		{
			name: "no free source ports", id: "source-ports",
			first: "new tcp connections to 203.0.113.9:443 fail, or " +
				"will",
			details: "nft-masq-agent connections 203.0.113.9 names the pods",
			facts:   func(f *StatusFacts) { f.Evidence.Fullest = fullPorts(-1) },
		},
		{
			name: "a full block", id: "source-ports",
			config:  "masqueradeSrcCIDRs: [10.244.0.0/16]\nportsPerPod: 250\n",
			first:   "new tcp connections of a pod to 203.0.113.9:443 fail, or will",
			details: "for pods whose IP ends in one of [0] are in use there\n  have it reuse connections",
			facts: func(f *StatusFacts) {
				f.Evidence.Fullest = fullPorts(0)
			},
		},
		{
			name: "none of snatAddresses", id: "snat-missing", config: "snatAddresses: [198.51.100.8]\n",
			first: "this node has none of snatAddresses",
		},
		{
			name: "an entry of snatRules without an address", id: "snat-rule-missing",
			config: "snatRules: [{from: [10.244.0.0/16], addresses: [198.51.100.8]}]\n",
			first:  "this node has no address of entry 1 of snatRules",
		},
		{
			name: "an entry for other nodes", first: "in sync: ",
			config: "snatRules: [{from: [10.244.0.0/16], addresses: [198.51.100.8]}, " +
				"{from: [10.244.0.0/16], addresses: [198.51.100.7]}]\n",
		},
		{
			name: "an entry for other pods", first: "in sync: ",
			config: "snatRules: [{from: [10.245.0.0/16], addresses: [198.51.100.8]}]\n",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := healthy(t, tt.config)
			if tt.facts != nil {
				tt.facts(f)
			}
			s := NewStatus(*f)
			shown := text(t, &s)
			if !strings.HasPrefix(shown, tt.first) || !strings.Contains(shown, tt.details) {
				t.Errorf("want %q and %q:\n%s", tt.first, tt.details, shown)
			}
			id := ""
			if len(s.Errors) > 0 {
				id = s.Errors[0].ID
			}
			if id != tt.id {
				t.Errorf("problem %q, want %q", id, tt.id)
			}
			noted := slices.ContainsFunc(slices.Concat(s.Warnings, s.Notes),
				func(p config.Problem) bool { return p.ID == tt.note })
			if tt.note != "" && !noted {
				t.Errorf("want a note %s: %v", tt.note, s.Notes)
			}
			for _, p := range slices.Concat(s.Warnings, s.Notes) {
				if !strings.Contains(shown, p.Msg) || strings.HasPrefix(p.Msg, "0 ") {
					t.Errorf("%s is not shown, or about nothing:\n%s", p.ID, shown)
				}
			}
		})
	}
}

// An example says of a connection what the list of connections says of it.
func TestAnExampleIsTheConnectionOfTheList(t *testing.T) {
	for _, age := range []conntrack.Age{conntrack.AgeStale, conntrack.AgeUndated, conntrack.AgeOverruled} {
		want := Connection{
			Protocol: "tcp", Source: "10.244.1.7:40000", Destination: "203.0.113.9:443", SeenAs: "192.0.2.77:40000",
			Timeout: 77, Verdict: nft.Masqueraded,
			Stale: age != conntrack.AgeOverruled, Overruled: age == conntrack.AgeOverruled,
		}
		count := conntrack.Count{Undated: 1, Examples: []conntrack.Example{exampleOf("192.0.2.77", age)}}
		status := healthy(t, "")
		status.Evidence.Counts = []conntrack.Count{count}
		if diff := cmp.Diff([]Connection{want}, NewStatus(*status).Evidence[0].Examples); diff != "" {
			t.Errorf("status, %s (-want +got)\n%s", age, diff)
		}
		if age == conntrack.AgeStale { // explain does not list them
			continue
		}
		facts := testFacts(t, "", "203.0.113.9:443")
		facts.evidenceOf(count, count)
		if diff := cmp.Diff([]Connection{want}, Explain(*facts).Contradicting); diff != "" {
			t.Errorf("explain, %s (-want +got)\n%s", age, diff)
		}
	}
}

// Each ID has one rank.
func TestEachProblemHasOneRank(t *testing.T) {
	found := map[string]bool{}
	for _, id := range weights {
		if found[id] {
			t.Errorf("%s has two ranks", id)
		}
		found[id] = true
	}
	for _, id := range health.IDs {
		if !found[id] {
			t.Errorf("%s has no rank", id)
		}
	}
}

func fullPorts(block int) conntrack.PortUse {
	return conntrack.PortUse{PortKey: conntrack.PortKey{
		Protocol: unix.IPPROTO_TCP, From: netip.MustParseAddr("192.0.2.1"), To: netip.MustParseAddrPort("203.0.113.9:443"),
		Among: judge.PortScope{Block: block, Ports: 100},
	}, Used: 95}
}

func TestTextOfAStatus(t *testing.T) {
	f := healthy(t, "nonMasqueradeCIDRs: [10.0.0.0/8]\nsnatAddresses: [198.51.100.7]\n")
	f.Agent.Policy = nil
	entry := judge.Entry{Key: "nonMasqueradeCIDRs", CIDR: netip.MustParsePrefix("10.0.0.0/8"), Verdict: nft.Exempt}
	f.Evidence.Counts = append(f.Evidence.Counts, conntrack.Count{Entry: entry, Agrees: 2, Stale: 1, Undated: 1})
	f.Evidence.Tracked = 9
	f.Counts = []nft.Counts{
		{Verdict: nft.Exempt, Packets: 7}, {Verdict: nft.Masqueraded}, {IPv6: true, Verdict: nft.Invalid, Packets: 2},
	}
	const want = `
agent        pid 7
config       HASH, from /its/config
connections  9 tracked; 5 of 7 that the policy concerns agree with it
addresses    198.51.100.7
pods         1 addresses on this node

Connections since the counters were created:
  ipv4  exempt                  7
  ipv6  invalid                 2 packets of pods without a connection, dropped (dropInvalid)

Connections by the entry that decides them:
  FAMILY  ENTRY                          VERDICT  OPEN  STALE  OVERRULED  UNDATED
  ipv4    anything else                           3     0      0          0
  ipv4    nonMasqueradeCIDRs 10.0.0.0/8  exempt   4     1      0          1
`
	s := NewStatus(*f)
	_, shown, _ := strings.Cut(strings.ReplaceAll(text(t, &s), f.Config.Hash, "HASH"), "\n")
	shown, _, _ = strings.Cut(shown, "\nNotes:")
	nfttest.Same(t, "status (-want +got)", want, shown)
	f.Verbose = true
	verbose := NewStatus(*f)
	if shown := text(t, &verbose); !strings.Contains(shown, "  ipv4  masqueraded             0\n") {
		t.Errorf("status -v:\n%s", shown)
	}
	f.Kernel.Hash = ""
	for _, facts := range []*StatusFacts{f, healthy(t, "")} {
		s := NewStatus(*facts)
		if shown := text(t, &s); strings.Contains(shown, "since the counters") {
			t.Errorf("status without counters, or without rules:\n%s", shown)
		}
	}
}

// Another config can differ in hundreds of chains.
func TestTextListsTheFirstDifferences(t *testing.T) {
	f := healthy(t, "")
	for i := range 25 {
		f.Kernel.Differences = append(f.Kernel.Differences, fmt.Sprintf("chain ports-%d is missing", i))
	}
	all := NewStatus(*f)
	text := text(t, &all)
	last := "ports-19 is missing\n  and 5 more: -o json lists all\n"
	if !strings.Contains(text, last) || strings.Contains(text, "ports-20") {
		t.Errorf("status lists\n%s", text)
	}
}

package answer

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/cmd/nft-masq-agent/internal/reply"
	"nft-masq-agent/cmd/nft-masq-agent/internal/report"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/neighbors"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/nfttest/loop"
	"nft-masq-agent/nft/nfttest/script"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/trace"
)

var update = flag.Bool("update", false, "regenerate testdata/answers.txt")

// A row is a config, and what is asked about it.
type row struct {
	*testing.T
	options.Options
	Loaded
	err    error
	policy nft.Policy
	pods   []netip.Prefix
	status Status
	said   strings.Builder
}

// questions are those of testdata/answers.txt. Each is a word in a row, with what it is about.
var questions = map[string]func(r *row, about string){
	"pods": func(r *row, list string) {
		for p := range strings.FieldsSeq(list) {
			r.pods = append(r.pods, netip.MustParsePrefix(p))
		}
	},
	"node": func(r *row, list string) { r.policy = r.policy.On(cases.Addrs(strings.Fields(list)...)) },
	"snat": func(r *row, _ string) {
		for _, s := range NodeSNAT(r.policy) {
			r.say(s)
		}
	},
	"lint": func(r *row, _ string) { r.problems(Lint(r.policy, r.pods)) },
	"interfaces": func(r *row, list string) { // with MASTER=KIND after a slash
		var all []routes.Interface
		for i := range strings.FieldsSeq(list) {
			name, master, _ := strings.Cut(i, "/")
			master, kind, _ := strings.Cut(master, "=")
			all = append(all, routes.Interface{Name: name, Master: master, MasterKind: kind})
		}
		r.problems(Interfaces(neighbors.AbsentInterfaces(r.policy, all)))
	},
	"check": func(r *row, _ string) {
		if r.err != nil {
			r.Fatal(r.err)
		}
		c := NewCheck(reply.NewHead("check"), r.Options, r.Loaded, nil)
		w := bufio.NewWriter(&r.said)
		c.Print(w)
		w.Flush()
	},
	"win-bridge": func(r *row, api string) {
		text, leftOut, err := WinBridge(nfttest.Must(strconv.Atoi(api)), r.Config, r.policy)
		r.say(strings.TrimSpace(text), leftOut, err)
	},
	"explain": func(r *row, about string) { // SOURCE DESTINATION [IN OUT], IN "node" for one that the node sends
		words := append(strings.Fields(about), "", "")
		src, dst := netip.MustParseAddr(words[0]), netip.MustParseAddr(words[1])
		ways := routes.Routes{Ways: []routes.Route{{Type: unix.RTN_UNICAST, Interface: routes.Interface{Name: words[3]}}}}
		if ways.Back.Interface.Name = words[2]; words[2] == "node" {
			ways.Back = routes.Route{Type: unix.RTN_LOCAL}
		}
		x := Explanation{Config: NewConfig(r.Options, r.Loaded, r.err)}
		x.SetDestination(netip.AddrPortFrom(dst, 0), 0)
		x.SetSource(src, false, words[2] == "node")
		x.Ask(r.policy, src, dst, ways)
		r.say(x.String())
	},
	"blocks": func(r *row, pods string) {
		var c Connections
		notes, ok := c.SetBlocks(r.policy, cases.Addrs(strings.Fields(pods)...), 2)
		r.say(ok)
		r.problems(notes)
		r.say(c.String())
	},
	"seen-as": func(r *row, about string) { // ADDRESS:PORT and pods of this node; without, of another one
		words := strings.Fields(about)
		seen, c := netip.MustParseAddrPort(words[0]), Connections{Head: reply.NewHead("connections")}
		ask := func() (config.Problems, bool) { return c.OfAnotherNode(r.policy, seen, r.pods) }
		if len(words) > 1 {
			ask = func() (config.Problems, bool) {
				return c.SetBlock(r.policy, seen, cases.Addrs(words[1:]...), r.pods)
			}
		}
		notes, ok := ask()
		r.say(ok)
		r.problems(notes)
		r.say(c.String())
	},
	"kernel": func(r *row, hash string) {
		r.status.Kernel = Kernel{Mode: "nftables", Hash: hash, Differences: []string{"chain postrouting"}}
		if hash == "same" {
			r.status.Kernel = Kernel{Mode: "nftables", Hash: r.Ruleset.Hash(), InSync: true}
		}
	},
	"agent": func(r *row, text string) {
		var a report.Report
		nfttest.Check(json.Unmarshal([]byte(text), &a))
		r.status.SetAgent(a)
	},
	"counters": func(r *row, n string) {
		count := nfttest.Must(strconv.ParseUint(n, 10, 64))
		r.status.SetConnections([]nft.Counts{
			{Verdict: nft.Masqueraded, Packets: count},
			{IPv6: true, Verdict: nft.Exempt, Packets: 2 * count},
			{Verdict: nft.Invalid, Packets: 7},
		})
	},
	"stale": func(r *row, n string) {
		count := nfttest.Must(strconv.Atoi(n))
		s := conntrack.Stale{Count: count, Sample: conntrack.Sample{Partial: count > 1, Examined: 9}}
		if count > 1 {
			s.Oldest = time.Unix(1e9, 0)
		}
		r.status.SetStale(s)
	},
	"full": func(r *row, block string) {
		k := conntrack.PortKey{
			Protocol: unix.IPPROTO_TCP, From: netip.MustParseAddr("192.0.2.1"), To: netip.MustParseAddrPort("203.0.113.9:443"),
			Among: judge.PortScope{Block: nfttest.Must(strconv.Atoi(block)), Ports: 100},
		}
		other := k
		other.To = netip.MustParseAddrPort("203.0.113.9:80")
		r.status.SetPorts(conntrack.Tally{k: 95, other: 90}, func(conntrack.PortKey) []netip.Addr {
			return cases.Addrs("10.244.1.2")
		})
	},
	"unread": func(r *row, _ string) {
		r.status.SetOthers(neighbors.Others{Unread: 3, Unasked: 4, Devices: []string{"netdev t c"}}, false)
	},
	"conflicts": func(r *row, list string) { r.status.SetOthers(neighbors.Others{Conflicts: rulesOf(list)}, false) },
	"overruled": func(r *row, list string) { r.status.SetOthers(neighbors.Others{Overruled: rulesOf(list)}, false) },
	"prevented": func(r *row, list string) { r.status.SetOthers(neighbors.Others{Overridden: rulesOf(list)}, false) },
	"older": func(r *row, takeOver string) {
		r.status.SetOthers(neighbors.Others{Legacy: loop.OlderChains("idle")}, takeOver != "")
	},
	"at-devices": func(r *row, sources string) { // of open connections
		x := Explanation{Headline: "203.0.113.9 sees 192.0.2.1."}
		open := map[netip.Addr]int{}
		for i, a := range cases.Addrs(strings.Fields(sources)...) {
			open[a] = i + 1
		}
		r.say(x.SetDevices([]string{"netdev t c", "netdev t d"}, open))
		r.say(x.String())
	},
	"status": func(r *row, others string) {
		r.status.SNAT = NodeSNAT(r.policy)
		r.status.SetForwards("on")
		r.status.Conclude(r.Options, r.Ruleset, others)
		r.say(r.status.String())
	},
}

// rulesOf are rules of other programs: each is what it does, and a handle.
func rulesOf(list string) (all []neighbors.Conflict) {
	for text := range strings.FieldsSeq(list) {
		does, handle, _ := strings.Cut(text, ":")
		c := neighbors.Conflict{Finding: trace.Finding{Code: trace.Drops, Base: postrouting}}
		c.Rule = nfnetlink.Rule{Family: nfnetlink.IPv4, Table: "cni", Chain: "post"}
		c.Rule.Handle = nfttest.Must(strconv.ParseUint(handle, 10, 64))
		for c.Kind.String() != does {
			c.Kind++
		}
		all = append(all, c)
	}
	return all
}

func (r *row) say(what ...any) {
	r.said.WriteString(strings.TrimRight(fmt.Sprintln(what...), "\n") + "\n")
}

func (r *row) problems(all config.Problems) {
	for _, p := range all {
		r.say(p.Level.String(), p.ID+":", p.Error())
	}
}

// Each case of testdata/answers.txt is a config, then questions, each followed by its answer.
func TestAnswersAreThoseOfTheirRows(t *testing.T) {
	script.Golden(t, "testdata/answers.txt", *update, func(t *testing.T, c *script.Case) {
		file, asked := "", c.Steps
		for len(asked) > 0 {
			if verb, _ := asked[0].Words(); questions[verb] != nil {
				break
			}
			file += asked[0].Line + "\n"
			asked = asked[1:]
		}
		r := &row{T: t, Options: *options.AddRunFlags(flag.NewFlagSet("status", flag.ContinueOnError))}
		r.ConfigPath, r.Input = "-", strings.NewReader(file)
		if r.Loaded, r.err = Load(r.Options); r.Ruleset != nil {
			r.policy = r.Ruleset.Policy
		}
		r.status = NewStatus(reply.NewHead("status"), r.Options, r.Loaded, r.err)
		for _, s := range asked {
			verb, about := s.Words()
			question := questions[verb]
			if question == nil {
				s.Unknown(t)
			}
			r.said.Reset()
			question(r, about)
			s.Say(r.said.String())
		}
	})
}

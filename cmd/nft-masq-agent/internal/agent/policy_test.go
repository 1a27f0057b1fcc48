package agent

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/foreign"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
)

func rulesetOf(cidrs ...string) *nft.Ruleset {
	var c config.Config
	for _, cidr := range cidrs {
		parsed, problems := config.Parse(config.Defaults{}, file(cidr).Sources...)
		if err := problems.Err(); err != nil {
			panic(err)
		}
		c.NonMasqueradeCIDRs = append(c.NonMasqueradeCIDRs, parsed.NonMasqueradeCIDRs...)
	}
	r := nft.Compile(c, nft.Options{Layout: native.Layout{}})
	return &r
}

func TestEnforcedPolicyBeforeAConfigIsAccepted(t *testing.T) {
	left := &layout.Installed{Hash: "12345678"}
	lenient, other, defaults := rulesetOf("10.2.0.0/16"), rulesetOf("10.3.0.0/16"), rulesetOf("10.0.0.0/8")
	good := rulesetOf("10.4.0.0/16")
	for _, tt := range []struct {
		name string
		now  policy
		c    content
		n    situation
		want policy
	}{
		{"what a previous run left comes first", policy{}, content{lenient: lenient}, situation{left, true, *defaults}, policy{from: FromPrevious, left: left}},
		{"then what the older agents make of the file", policy{}, content{lenient: lenient}, situation{nil, true, *defaults}, policy{from: FromLenient, want: lenient}},
		{"then the rules of an older agent", policy{}, content{}, situation{nil, true, *defaults}, policy{from: FromForeign}},
		{"then the defaults", policy{}, content{}, situation{defaults: *defaults}, policy{from: FromDefaults, want: defaults}},
		{
			"rules of a previous run stay as long as they are there",
			policy{from: FromPrevious, left: left},
			content{lenient: lenient},
			situation{left, true, *defaults},
			policy{from: FromPrevious, left: left},
		},
		{
			"once they are gone, it is decided again",
			policy{from: FromPrevious, left: left},
			content{lenient: lenient},
			situation{nil, true, *defaults},
			policy{from: FromLenient, want: lenient},
		},
		{"the older agents would follow the file", policy{from: FromLenient, want: lenient}, content{lenient: other}, situation{}, policy{from: FromLenient, want: other}},
		{
			"and keep what they have if they reject it",
			policy{from: FromLenient, want: lenient},
			content{},
			situation{nil, true, *defaults},
			policy{from: FromLenient, want: lenient},
		},
		{"a removed agent does not stay active", policy{from: FromForeign}, content{}, situation{defaults: *defaults}, policy{from: FromDefaults, want: defaults}},
		{"the defaults give way to an older agent", policy{from: FromDefaults, want: defaults}, content{}, situation{nil, true, *defaults}, policy{from: FromForeign}},
		{"and to what the older agents make of a file", policy{from: FromDefaults, want: defaults}, content{lenient: lenient}, situation{}, policy{from: FromLenient, want: lenient}},
		{"a good file always counts", policy{from: FromForeign}, content{want: good}, situation{nil, true, *defaults}, policy{from: FromFile, want: good, accepted: true}},
		{"its absence too", policy{from: FromFile, want: good, accepted: true}, content{want: defaults, absent: true}, situation{}, policy{from: FromDefaults, want: defaults, accepted: true}},
		{"the last good config stays", policy{from: FromFile, want: good, accepted: true}, content{lenient: lenient}, situation{left, true, *defaults}, policy{from: FromPrevious, want: good, accepted: true}},
		{"again and again", policy{from: FromPrevious, want: good, accepted: true}, content{lenient: lenient}, situation{left, true, *defaults}, policy{from: FromPrevious, want: good, accepted: true}},
		{"so do the defaults of a missing file", policy{from: FromDefaults, want: defaults, accepted: true}, content{lenient: lenient}, situation{left, true, *defaults}, policy{from: FromDefaults, want: defaults, accepted: true}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := decide(tt.now, tt.c, tt.n); !got.same(tt.want) || got.accepted != tt.want.accepted {
				t.Errorf("%s %s, want %s %s", got.from, got.hash(), tt.want.from, tt.want.hash())
			}
		})
	}
}

// decides is an older agent's rules on a node, reachable by packets.
func decides() kernel.Others {
	o := legacy()
	o.Legacy[0].Base = &nfnetlink.Chain{Name: "POSTROUTING"}
	return o
}

// unusable are the ways in which the first content can be unusable.
var unusable = map[string]Files{
	"rejected":   file("10.0.0.1"),
	"unreadable": {Err: errors.New("permission denied")},
}

func (w *world) wantSource(t *testing.T, want Source) {
	t.Helper()
	synctest.Wait()
	if got := w.agent.health.now().policy.from; got != want {
		t.Errorf("%s is enforced, want %s", got, want)
	}
	if err := w.agent.Ready(); err == nil && want != FromFile {
		t.Error("ready")
	}
}

func TestOlderAgentStaysActiveUntilAConfigIsAccepted(t *testing.T) {
	for name, f := range unusable {
		for _, takeOver := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, takeover %t", name, takeOver), func(t *testing.T) {
				bubble(t, takeOver, func(t *testing.T, w *world) {
					w.find(decides())
					w.files <- f
					w.wantSource(t, FromForeign)
					wantLines(t, w.messages(), "starting",
						"config rejected; the rules of an iptables-based agent stay active, and nothing is written")
					for range 3 {
						w.noticed(nfnetlink.Change{Writer: 1})
						time.Sleep(time.Minute)
					}
					synctest.Wait()
					if len(w.writes) > 0 || len(w.seen().Legacy) == 0 {
						t.Errorf("wrote %q, left %v", w.writes, w.seen().Legacy)
					}
					wantLines(t, w.messages())
					w.files <- file("10.1.0.0/16")
					w.wantSource(t, FromFile)
					if w.held != hashOf(t, file("10.1.0.0/16")) || (w.last == layout.TakeOver) != takeOver {
						t.Errorf("kernel has %s after a read of depth %d", w.held, w.last)
					}
				})
			})
		}
	}
}

func TestDefaultsReplaceAndYieldToAnOlderAgent(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.find(decides())
		w.files <- unusable["rejected"]
		synctest.Wait()
		w.messages()
		// It writes its rules in two steps.
		w.find(kernel.Others{})
		w.noticed(nfnetlink.Change{Writer: 1})
		w.wantSource(t, FromForeign)
		w.find(decides())
		w.noticed(nfnetlink.Change{Writer: 1})
		time.Sleep(2 * time.Second)
		w.wantSource(t, FromForeign)
		wantLines(t, w.messages())

		w.find(kernel.Others{})
		w.noticed(nfnetlink.Change{Writer: 1})
		time.Sleep(2 * time.Second)
		w.wantSource(t, FromDefaults)
		defaults := hashOf(t, Files{})
		if w.held != defaults {
			t.Errorf("kernel has %s, want the defaults", w.held)
		}
		wantLines(t, w.messages(), "config still rejected; from now on built-in defaults ("+defaults+") are enforced", "applied")

		w.find(decides())
		w.noticed(nfnetlink.Change{Writer: 1})
		w.wantSource(t, FromForeign)
		if w.held != "" {
			t.Errorf("kernel has %s next to the older agent", w.held)
		}
		wantLines(t, w.messages(), "config still rejected; from now on the rules of an iptables-based agent stay active, and nothing is written")
	})
}

func TestJumpsToAMissingChainDoNotCount(t *testing.T) {
	for name, o := range map[string]kernel.Others{
		"no packets get there": legacy(),
		"gone":                 {Legacy: []foreign.LegacyChain{{Name: "IP-MASQ", Gone: true, Base: &nfnetlink.Chain{}}}},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				w.find(o)
				w.files <- unusable["rejected"]
				w.wantSource(t, FromDefaults)
			})
		})
	}
}

func TestOrderAppliesOnceTheKernelCanBeRead(t *testing.T) {
	for name, f := range unusable {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				w.refuse(unix.EPERM)
				w.find(decides())
				w.files <- f
				w.wantSource(t, "")
				w.refuse(nil)
				time.Sleep(2 * time.Second)
				w.wantSource(t, FromForeign)
				w.left = &layout.Installed{Hash: "12345678"}
				w.noticed(nfnetlink.Change{Writer: 1})
				w.wantSource(t, FromPrevious)
				if len(w.writes) > 0 {
					t.Errorf("wrote %q", w.writes)
				}
			})
		})
	}
}

func TestOnlyInstalledRulesAreReportedAsEnforced(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		a, b := file("10.1.0.0/16"), file("10.2.0.0/16")
		w.files <- a
		synctest.Wait()
		w.messages()
		w.refuse(unix.EPERM)
		w.files <- b
		w.files <- unusable["rejected"]
		synctest.Wait()
		wantLines(t, w.messages(), "cannot read nftables; previous rules stay, retrying",
			fmt.Sprintf("config rejected; last good config (%s) is not in the kernel yet, which still has %s", hashOf(t, b), hashOf(t, a)))
		w.refuse(nil)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		wantLines(t, w.messages(), "kernel accepted the rules again", "applied")
		w.wantSource(t, FromPrevious)
		w.files <- b
		synctest.Wait()
		wantLines(t, w.messages(), "config accepted again; rules are in place")
		w.wantSource(t, FromFile)
	})
}

func TestFileRejectedOnlyByThisAgentIsReadLeniently(t *testing.T) {
	misspelled := func(cidr string) Files {
		f := file(cidr)
		f.Sources[0].Data = append(f.Sources[0].Data, "resyncIntervall: 30s\n"...)
		return f
	}
	for _, takeOver := range []bool{false, true} {
		bubble(t, takeOver, func(t *testing.T, w *world) {
			w.find(decides())
			for _, cidr := range []string{"10.1.0.0/16", "10.2.0.0/16"} {
				w.files <- misspelled(cidr)
				w.wantSource(t, FromLenient)
				if want := hashOf(t, file(cidr)); w.held != want {
					t.Errorf("kernel has %s, want %s", w.held, want)
				}
				w.files <- unusable["rejected"]
				w.wantSource(t, FromLenient)
			}
			w.hangup <- unix.SIGHUP
			synctest.Wait()
			if len(w.seen().Legacy) == 0 {
				t.Error("taken over before a config was accepted")
			}
			w.files <- file("10.3.0.0/16")
			w.wantSource(t, FromFile)
			if (len(w.seen().Legacy) == 0) != takeOver {
				t.Errorf("left %v", w.seen().Legacy)
			}
		})
	}
}

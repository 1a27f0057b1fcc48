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

func TestPolicyIsDecidedInThisOrder(t *testing.T) {
	left := &layout.Installed{Hash: "12345678"}
	bad := errors.New("bad")
	compiled := func(err error, cidr string) content {
		return content{files: file(cidr).Sources, err: err, want: rulesetOf(cidr)}
	}
	lenient, other, good := compiled(bad, "10.2.0.0/16"), compiled(bad, "10.3.0.0/16"), compiled(nil, "10.4.0.0/16")
	rejected, defaults := content{err: bad}, content{want: rulesetOf("10.0.0.0/8")}
	of := func(from Source, c content) policy { return policy{from: from, want: c.want, content: c} }
	accepted := func(from Source, c content) policy {
		p := of(from, c)
		p.accepted = true
		return p
	}
	kept, foreign := policy{from: FromPrevious, left: left}, policy{from: FromForeign}
	everything, older, empty := situation{left, true, defaults}, situation{nil, true, defaults},
		situation{nil, false, defaults}
	for _, tt := range []struct {
		name string
		now  policy
		c    content
		n    situation
		want policy
	}{
		{"what a previous run left comes first", policy{}, lenient, everything, kept},
		{"then what the older agents make of the file", policy{}, lenient, older, of(FromLenient, lenient)},
		{"then the rules of an older agent", policy{}, rejected, older, foreign},
		{"then the defaults", policy{}, rejected, empty, of(FromDefaults, defaults)},
		{"rules of a previous run stay as long as they are there", kept, lenient, everything, kept},
		{"once they are gone, it is decided again", kept, lenient, older, of(FromLenient, lenient)},
		{
			"our own rules are not those of a previous run", of(FromLenient, lenient), other, everything,
			of(FromLenient, other),
		},
		{
			"the older agents keep what they have if they reject a file", of(FromLenient, lenient), rejected, older,
			of(FromLenient, lenient),
		},
		{"a removed agent does not stay active with another file", foreign, rejected, empty, of(FromDefaults, defaults)},
		{
			"the defaults stay next to an older agent that comes later", of(FromDefaults, defaults), rejected, older,
			of(FromDefaults, defaults),
		},
		{
			"they give way to what the older agents make of a file", of(FromDefaults, defaults), lenient, empty,
			of(FromLenient, lenient),
		},
		{"a good file always counts", foreign, good, everything, accepted(FromFile, good)},
		{"its absence too", accepted(FromFile, good), defaults, empty, accepted(FromDefaults, defaults)},
		{"the last good config stays", accepted(FromFile, good), lenient, everything, accepted(FromPrevious, good)},
		{"again and again", accepted(FromPrevious, good), lenient, everything, accepted(FromPrevious, good)},
		{
			"so do the defaults of a missing file", accepted(FromDefaults, defaults), lenient, everything,
			accepted(FromDefaults, defaults),
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := decide(tt.now, tt.c, tt.n)
			if got.from != tt.want.from || got.want != tt.want.want || got.content.want != tt.want.want ||
				got.accepted != tt.want.accepted || got.left != tt.want.left {
				t.Errorf("%+v, want %+v", got, tt.want)
			}
		})
	}
}

// decides is an older agent's rules on a node, reachable by packets.
func decides() found {
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
	if got := w.agent.now().policy.from; got != want {
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
						w.noticed()
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

func TestPolicyIsDecidedOnceForAContent(t *testing.T) {
	for name, tt := range map[string]struct {
		before, after found
		source        Source
	}{
		"an older agent goes":  {decides(), found{}, FromForeign},
		"an older agent comes": {found{}, decides(), FromDefaults},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *world) {
				w.find(tt.before)
				w.files <- unusable["rejected"]
				w.wantSource(t, tt.source)
				held := w.held
				w.find(tt.after)
				w.noticed()
				w.hangup <- unix.SIGHUP
				time.Sleep(10 * time.Minute)
				w.wantSource(t, tt.source)
				if w.held != held {
					t.Errorf("kernel has %s, had %s", w.held, held)
				}
				// Another content is another decision, unless there are rules of ours.
				w.files <- unusable["unreadable"]
				w.wantSource(t, FromDefaults)
			})
		})
	}
}

func TestChainsThatNoPacketReachesDoNotCount(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.find(legacy())
		w.files <- unusable["rejected"]
		w.wantSource(t, FromDefaults)
	})
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
				if len(w.writes) > 0 {
					t.Errorf("wrote %q", w.writes)
				}
				// The next content is decided by what is there then.
				w.refuse(unix.EPERM)
				w.find(found{})
				w.files <- file("10.0.0.2")
				w.wantSource(t, "")
				w.refuse(nil)
				time.Sleep(2 * time.Second)
				w.wantSource(t, FromDefaults)
			})
		})
	}
}

func TestOnlyInstalledRulesAreReportedAsEnforced(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		a, b := file("10.1.0.0/16"), file("10.2.0.0/16")
		w.gets(a)
		w.messages()
		w.refuse(unix.EPERM)
		w.files <- b
		w.gets(unusable["rejected"])
		wantLines(t, w.messages(), "cannot read nftables: CAP_NET_ADMIN is missing; retrying",
			fmt.Sprintf("config rejected; last good config (%s) is not in the kernel yet, which still has %s", hashOf(t, b),
				hashOf(t, a)))
		w.refuse(nil)
		pass(2 * time.Second)
		wantLines(t, w.messages(), "kernel accepted the rules again", "applied")
		w.wantSource(t, FromPrevious)
		w.gets(b)
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

package trace_test

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/trace"
)

// A chain, a set or a map that would exceed a bound is not read, and may do anything.
func TestReadingEndsAtItsBounds(t *testing.T) {
	t.Parallel()
	ns, c := dialNS(t)
	nfttest.NFT(t, ns, `table ip t {
		set s { type ipv4_addr; elements = { 10.0.0.1, 10.0.0.2 }; }
		map m { type ipv4_addr : verdict; elements = { 10.0.0.3 : jump accepting, 10.0.0.4 : jump accepting }; }
		chain accepting { counter; counter; accept; }
		chain translating { ip daddr 203.0.113.8 return; counter; snat to 192.0.2.7; }
		chain early { type filter hook postrouting priority -150; ip saddr @s accept; ip saddr vmap @m; drop; }
		chain nat { type nat hook postrouting priority 100; jump translating; masquerade; }
	}`, "-f", "-")
	const (
		many = 1 << 20
		hit  = "192.0.2.7"
		of   = ", which has too many to read"
		some = "anything; passes; if the rules of chain nat" + of + "; may be dropped by the rules of chain early" + of
		more = "anything; masquerade; passes; if the rules of chain translating" + of
		may  = "; may be dropped by the rules of chain early" + of
		lost = "; may be dropped by the rules of chain accepting" + of + "; may be dropped by drop"
		maps = "; may be dropped by ip saddr vmap @m; may be dropped by drop"
	)
	for _, tt := range []struct {
		left   trace.Near
		read   [2]int // chains, sets and maps
		unread int    // rules
		want   string
	}{
		{trace.Near{many, many, many}, [2]int{4, 2}, 0, hit},
		{trace.Near{1, many, many}, [2]int{0, 0}, 5, some},
		{trace.Near{2, many, many}, [2]int{1, 0}, 7, more + may},
		{trace.Near{5, many, many}, [2]int{2, 2}, 9, more + lost},
		{trace.Near{6, many, many}, [2]int{2, 0}, 3, hit + may},
		{trace.Near{7, many, many}, [2]int{2, 0}, 3, hit + may},
		{trace.Near{8, many, many}, [2]int{3, 2}, 5, hit + lost},
		{trace.Near{12, many, many}, [2]int{3, 2}, 5, hit + lost},
		{trace.Near{13, many, many}, [2]int{4, 2}, 0, hit},
		{trace.Near{many, 0, many}, [2]int{0, 0}, 5, some},
		{trace.Near{many, many, 0}, [2]int{3, 0}, 0, hit + maps},
		{trace.Near{many, many, 1}, [2]int{3, 0}, 0, hit + maps},
		{trace.Near{many, many, 2}, [2]int{3, 1}, 0, hit + maps},
		{trace.Near{many, many, 3}, [2]int{3, 1}, 0, hit + maps},
		{trace.Near{many, many, 4}, [2]int{4, 2}, 0, hit},
	} {
		tracer, err := trace.TracerNear(c, tt.left)
		if err != nil {
			t.Fatal(err)
		}
		chains, sets := tracer.Content()
		p := trace.Packet{Src: netip.MustParseAddr("10.0.0.3"), Dst: netip.MustParseAddr("203.0.113.9")}
		got := traced(tracer.At(p, unix.NF_INET_POST_ROUTING), false)
		if content := [2]int{chains, sets}; content != tt.read || tracer.Unread != tt.unread || got != tt.want {
			t.Errorf("%+v: read %d, not %d: %s", tt, content, tracer.Unread, got)
		}
	}
}

// failing connects through a socket that does not send a request for which before returns an error.
func failing(t *testing.T, ns *nfttest.NS, before func(kind netlink.HeaderType) error) *nfnetlink.Conn {
	t.Helper()
	dial := func() (*netlink.Conn, error) { return nfttest.DialNetfilter(ns) }
	c := nfnetlink.New(nfttest.Through(dial, func(m *netlink.Message) error { return before(m.Header.Type & 0xff) }, nil))
	t.Cleanup(func() { c.Close() })
	return c
}

const someRules = `table ip t {
	set s { type ipv4_addr; elements = { 10.0.0.1 }; }
	map m { type ipv4_addr : verdict; elements = { 10.0.0.3 : goto masking }; }
	chain masking { masquerade; }
	chain post { type nat hook postrouting priority 100; ip saddr @s accept; ip saddr vmap @m; }
}`

// Whatever request fails, reading does. Only a set may be gone meanwhile.
func TestReadingFailsWithEachRequest(t *testing.T) {
	t.Parallel()
	ns, _ := dialNS(t)
	nfttest.NFT(t, ns, someRules, "-f", "-")
	for at, done := 0, false; !done; at++ {
		for _, fault := range []error{unix.EIO, unix.ENOENT} {
			n, kind := 0, netlink.HeaderType(0)
			s, err := trace.Read(failing(t, ns, func(k netlink.HeaderType) error {
				if n++; n == at+1 {
					kind = k
					return fault
				}
				return nil
			}), everything)
			if done = kind == 0; done || fault == unix.ENOENT && kind == unix.NFT_MSG_GETSETELEM {
				if err != nil || s == nil {
					t.Errorf("request %d (%d): %v: %v", at, kind, fault, err)
				}
			} else if !errors.Is(err, fault) || s != nil {
				t.Errorf("request %d (%d): %v, want %v", at, kind, err, fault)
			}
		}
	}
	for _, fault := range []error{nfnetlink.ErrInterrupted, unix.EIO} { // whoever asked may ask again
		fails := func(netlink.HeaderType) error { return fault }
		if s, err := trace.Read(failing(t, ns, fails), everything); s != nil || !errors.Is(err, fault) {
			t.Errorf("%v: %v", fault, err)
		}
	}
}

// While the ruleset changes, it is read up to three times.
func TestRulesThatChangeAreReadAgain(t *testing.T) {
	t.Parallel()
	for changes, requests := range map[int]int{0: 2, 1: 4, 2: 6, 3: 6, 9: 6} {
		ns, _ := dialNS(t)
		nfttest.NFT(t, ns, someRules, "-f", "-")
		asked := 0
		c := failing(t, ns, func(kind netlink.HeaderType) error {
			if kind != unix.NFT_MSG_GETGEN {
				return nil
			}
			if asked++; asked%2 == 0 && asked <= 2*changes {
				nfttest.NFT(t, ns, fmt.Sprintf("add table ip t%d", asked), "-f", "-")
			}
			return nil
		})
		s, err := trace.Read(c, everything)
		if err != nil || len(s.Chains) != 2 || asked != requests {
			t.Errorf("%d changes: read with %d requests, want %d: %v", changes, asked, requests, err)
		}
		if now, err := connect(t, ns).Generation(); err != nil || (now == s.Generation) != (changes < 3) {
			t.Errorf("%d changes: generation %d, now %d: %v", changes, s.Generation, now, err)
		}
	}
}

// A writer moves a rule from one chain to another and back, each time in one
// transaction: a reader that sees the rule in neither or both has read an
// inconsistent ruleset.
func TestReadDuringWritesIsConsistentOrReportsIt(t *testing.T) {
	ns, c := dialNS(t)
	nfttest.NFT(t, ns, `
		table ip a { chain p { type nat hook postrouting priority 100; masquerade
			}
		}
		table ip b { chain p { type nat hook postrouting priority 100;
			}
		}`, "-f", "-")
	rules, _, err := c.FirstRules(nfnetlink.IPv4, "a", "p", func(nfnetlink.Rule) bool { return false })
	if err != nil {
		t.Fatal(err)
	}
	writer := connect(t, ns)
	done := make(chan error)
	go func() {
		from, to := rules[0], rules[0]
		to.Table = "b"
		for range 500 {
			var b nfnetlink.Batch
			b.FlushChain(from.In())
			b.AddRule(to)
			if err := writer.Commit(&b, 0); err != nil {
				done <- err
				return
			}
			from, to = to, from
		}
		done <- nil
	}()
	for {
		s, err := trace.Read(c, everything)
		if err != nil && !errors.Is(err, nfnetlink.ErrInterrupted) {
			t.Fatal(err)
		}
		after, genErr := c.Generation()
		if genErr != nil {
			t.Fatal(genErr)
		}
		n := 0
		if err == nil {
			for _, c := range s.Chains {
				n += len(c.Rules)
			}
		}
		if err == nil && s.Generation == after && n != 1 {
			t.Errorf("%d rules at generation %d", n, after)
		}
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			return
		default:
		}
	}
}

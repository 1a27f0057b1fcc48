package nfnetlink_test

import (
	"strings"
	"testing"

	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
)

func listenIn(t *testing.T, ns *nfttest.NS) *nfnetlink.Listener {
	t.Helper()
	var l *nfnetlink.Listener
	must(t, ns.Do(func() (err error) {
		l, err = nfnetlink.Listen()
		return err
	}))
	return l
}

func TestListenerReportsTheWriter(t *testing.T) {
	nfttest.Require(t, "nft")
	ns := nfttest.NewNS(t, "listen")
	l := listenIn(t, ns)
	defer l.Close()
	c, _ := connIn(t, ns)
	for i := range 3 {
		b := createTable("t")
		if i > 0 {
			b.DelTable(nfnetlink.Inet, "t")
		}
		must(t, c.Commit(b, 0))
		g, err := c.Generation()
		must(t, err)
		change, err := l.Receive()
		must(t, err)
		if change.ID != g || change.Writer != c.PortID() || change.Overrun || change.Process == "" {
			t.Errorf("got %+v for generation %d, written by port %d", change, g, c.PortID())
		}
	}
	nfttest.NFT(t, ns, "", "add", "table", "ip", "other")
	change, err := l.Receive()
	must(t, err)
	if change.Process != "nft" || change.Writer == c.PortID() {
		t.Errorf("got %+v for nft", change)
	}
}

func TestListenerDistinguishesLargeTransactions(t *testing.T) {
	nfttest.Require(t, "nft")
	ns := nfttest.NewNS(t, "listen")
	l := listenIn(t, ns)
	defer l.Close()
	c, _ := connIn(t, ns)
	for _, tt := range []struct {
		prefixes int
		large    bool
	}{{10, false}, {4000, true}, {10, false}, {100, false}, {100, false}, {1000, true}, {0, false}} {
		b := createTable("t")
		b.DelTable(nfnetlink.Inet, "t")
		must(t, c.Commit(b, 0))
		if change, err := l.Receive(); err != nil || change.Large {
			t.Fatalf("a small transaction: %+v, error %v", change, err)
		}
		b = createTable("t")
		b.AddElements(nfnetlink.Inet, "t", "s", prefixes(tt.prefixes))
		must(t, c.Commit(b, 0))
		if change, err := l.Receive(); err != nil || change.Large != tt.large || change.Process == "" {
			t.Errorf("%d prefixes: %+v, error %v", tt.prefixes, change, err)
		}
	}
	nfttest.NFT(t, ns, strings.Repeat("add rule inet t c ip saddr 10.0.0.0/8 counter accept\n", 2000), "-f", "-")
	if change, err := l.Receive(); err != nil || !change.Large || change.Process != "nft" {
		t.Errorf("2,000 rules: %+v, error %v", change, err)
	}
}

func TestListenerReportsLostNotifications(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "listen")
	l := listenIn(t, ns)
	defer l.Close()
	c, _ := connIn(t, ns)
	// One large transaction is not enough: only one notification of each passes
	// the filter.
	prefixes := prefixes(4000)
	b := createTable("t")
	b.AddElements(nfnetlink.Inet, "t", "s", prefixes)
	must(t, c.Commit(b, 0))
	change, err := l.Receive()
	must(t, err)
	if change.Overrun {
		t.Error("a large transaction overran the listener")
	}
	for i := range 6000 {
		b := createTable("u")
		if i%2 == 1 {
			b.DelTable(nfnetlink.Inet, "u")
		}
		must(t, c.Commit(b, 0))
	}
	for range 6000 {
		if change, err = l.Receive(); err != nil || change.Overrun {
			break
		}
	}
	if err != nil || !change.Overrun {
		t.Errorf("after 6,000 unread transactions: %+v, error %v", change, err)
	}
}

func TestReceiveReturnsWhenListenerIsClosed(t *testing.T) {
	l := listenIn(t, nfttest.NewNS(t, "listen"))
	done := make(chan error)
	go func() {
		_, err := l.Receive()
		done <- err
	}()
	must(t, l.Close())
	if err := <-done; err == nil {
		t.Error("received a change")
	}
}

package nfnetlink_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

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
		if change.ID != g || change.Writer != c.PortID() || change.Lost || change.Process == "" {
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

func TestListenerNamesWhatChanged(t *testing.T) {
	nfttest.Require(t, "nft")
	ns := nfttest.NewNS(t, "listen")
	l := listenIn(t, ns)
	defer l.Close()
	nfttest.NFT(t, ns, `table ip nat { chain a { counter; accept; }; chain b { }; set s { type ipv4_addr; elements = { 10.0.0.1 }; }; }
add table inet other`, "-f", "-")
	change, err := l.Receive()
	must(t, err)
	var got []string
	for _, c := range change.Chains {
		got = append(got, strings.TrimSpace(c.Family.String()+" "+c.Table+" "+c.Name))
	}
	want := []string{"ip nat", "inet other", "ip nat a", "ip nat b"}
	slices.Sort(got)
	slices.Sort(want)
	if diff := cmp.Diff(want, got); diff != "" || change.Messages < 6 || change.Thread == 0 {
		t.Errorf("%+v (-want +got):\n%s", change, diff)
	}
}

func TestListenerReportsLostNotifications(t *testing.T) {
	t.Parallel()
	ns := nfttest.NewNS(t, "listen")
	l := listenIn(t, ns)
	defer l.Close()
	c, _ := connIn(t, ns)
	b := createTable("t")
	b.AddElements(nfnetlink.Inet, "t", "s", prefixes(60_000))
	must(t, c.Commit(b, 0))
	if change, err := l.Receive(); err != nil || !change.Lost {
		t.Errorf("after 60,000 elements: %d messages, lost %t, error %v", change.Messages, change.Lost, err)
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

package notify_test

import (
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/notify"
)

func TestMain(m *testing.M) { os.Exit(nfttest.Main(m)) }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// commit sends a transaction in a namespace, and returns the generation after it.
func commit(t *testing.T, ns *nfttest.NS, b *nfnetlink.Batch) (generation uint32) {
	t.Helper()
	c := nfnetlink.New(func() (*netlink.Conn, error) { return nfttest.DialNetfilter(ns) })
	must(t, c.Commit(b, 0))
	generation, err := c.Generation()
	must(t, err)
	must(t, c.Close())
	return generation
}

func TestListenerReportsTheProgram(t *testing.T) {
	nfttest.Require(t, "nft")
	ns := nfttest.NewNS(t, "listen")
	l := nfttest.In(t, ns, notify.Listen)
	defer l.Close()
	for range 3 {
		b := &nfnetlink.Batch{}
		b.AddTable(nfnetlink.Inet, "t")
		b.DelTable(nfnetlink.Inet, "t")
		g := commit(t, ns, b)
		change, err := l.Receive()
		must(t, err)
		if change.ID != g || change.Lost || change.Process == "" {
			t.Errorf("got %+v for generation %d", change, g)
		}
	}
	nfttest.NFT(t, ns, "", "add", "table", "ip", "other")
	change, err := l.Receive()
	must(t, err)
	if change.Process != "nft" {
		t.Errorf("got %+v for nft", change)
	}
}

func TestListenerNamesWhatChanged(t *testing.T) {
	nfttest.Require(t, "nft")
	ns := nfttest.NewNS(t, "listen")
	l := nfttest.In(t, ns, notify.Listen)
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
	l := nfttest.In(t, ns, notify.Listen)
	defer l.Close()
	var elements []netip.Prefix
	for at := netip.MustParseAddr("10.0.0.0"); len(elements) < 60_000; at = at.Next() {
		elements = append(elements, netip.PrefixFrom(at, 32))
	}
	b := &nfnetlink.Batch{}
	b.AddTable(nfnetlink.Inet, "t")
	b.AddSet(nfnetlink.Set{
		Family: nfnetlink.Inet, Table: "t", Name: "s", Flags: unix.NFT_SET_INTERVAL, KeyType: 7, KeyLen: 4,
	})
	b.AddElements(nfnetlink.Inet, "t", "s", elements)
	commit(t, ns, b)
	if change, err := l.Receive(); err != nil || !change.Lost {
		t.Errorf("after 60,000 elements: %d messages, lost %t, error %v", change.Messages, change.Lost, err)
	}
}

func TestReceiveReturnsWhenListenerIsClosed(t *testing.T) {
	l := nfttest.In(t, nfttest.NewNS(t, "listen"), notify.Listen)
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

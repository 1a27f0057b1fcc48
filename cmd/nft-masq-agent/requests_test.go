package main

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
)

// counted counts the lists of rules and elements that are requested, each by its table and its chain or set.
func counted(lists map[string]int) func(m *netlink.Message) error {
	return func(m *netlink.Message) error {
		kind := map[netlink.HeaderType]string{unix.NFT_MSG_GETRULE: "rules", unix.NFT_MSG_GETSETELEM: "elements"}
		what := kind[m.Header.Type&0xff]
		if what == "" || m.Header.Flags&netlink.Dump == 0 {
			return nil
		}
		for _, family := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6, nfnetlink.Inet} {
			if m.Data[0] == byte(family) {
				what += " " + family.String()
			}
		}
		attributes, err := netlink.UnmarshalAttributes(m.Data[4:])
		for _, a := range attributes {
			what += " " + strings.TrimRight(string(a.Data), "\x00")
		}
		lists[what]++
		return err
	}
}

// Our rules are read once for all that a command says, and other programs' at most once. No connection to the kernel is
// left.
func TestACommandReadsEachListOnce(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.swap("nonMasqueradeCIDRs: [10.0.0.0/8]\n")
	nfttest.NFT(t, n.NS, `
		table ip other {
			set some { type ipv4_addr; elements = { 198.51.100.1 }; }
			chain post { type nat hook postrouting priority 90; jump more; }
			chain more { ip daddr @some masquerade; }
		}`, "-f", "-")
	k := n.kernel()
	defer k.Close()
	if _, err := k.Apply(t.Context(), wants(t, "nonMasqueradeCIDRs: [10.0.0.0/8]\n"), nft.WithLeftovers); err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"status", "diff", "connections --stale", "cleanup --dry-run"} {
		lists, open := map[string]int{}, []*netlink.Conn{}
		var stdout, stderr bytes.Buffer
		e := testEnvironment(t, &stdout, &stderr)
		dial := func() (*netlink.Conn, error) { // on the node's thread
			c, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
			open = append(open, c)
			return c, err
		}
		e.kernel = kernel.New(nfnetlink.New(nfttest.Through(dial, counted(lists), nil)))
		n.check(n.Do(func() error {
			if code := dispatch(
				t.Context(),
				commands(),
				append(strings.Fields(line), "--config", n.path),
				e,
			); code == exitUsage {
				t.Errorf("%s: exit code %d: %s%s", line, code, &stdout, &stderr)
			}
			return nil
		}))
		own := []string{"rules inet " + nft.TableName, "elements inet " + nft.TableName + " non-masq-v4-a"}
		for _, list := range own {
			if lists[list] != 1 && line != "cleanup --dry-run" {
				t.Errorf("%s read the %s %d times", line, list, lists[list])
			}
		}
		n.check(e.kernel.Close())
		for _, c := range open {
			if c.SetDeadline(time.Time{}) == nil {
				t.Errorf("%s leaves a connection open", line)
			}
		}
		for list, times := range lists {
			if times > 1 {
				t.Errorf("%s read the %s %d times", line, list, times)
			}
		}
	}
}

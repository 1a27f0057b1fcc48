package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"iter"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
)

// A counted is a socket of which the lists of rules and elements that are requested
// are counted, each by its table and its chain or set.
type counted struct {
	real  *netlink.Conn
	lists map[string]int
	last  uint32 // sequence of the last request
}

func (c *counted) Close() error { return c.real.Close() }

func (c *counted) Send(m netlink.Message) error {
	c.last = m.Header.Sequence
	kind := map[netlink.HeaderType]string{unix.NFT_MSG_GETRULE: "rules", unix.NFT_MSG_GETSETELEM: "elements"}
	if what := kind[m.Header.Type&0xff]; what != "" && m.Header.Flags&netlink.Dump != 0 {
		for _, family := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6, nfnetlink.Inet} {
			if m.Data[0] == byte(family) {
				what += " " + family.String()
			}
		}
		attributes, err := netlink.UnmarshalAttributes(m.Data[4:])
		if err != nil {
			return err
		}
		for _, a := range attributes {
			what += " " + strings.TrimRight(string(a.Data), "\x00")
		}
		c.lists[what]++
	}
	_, err := c.real.Send(m)
	return err
}

func (c *counted) SendMessages(m []netlink.Message) error {
	c.last = m[0].Header.Sequence
	_, err := c.real.SendMessages(m)
	return err
}

// Receive adds the end of a list, which the real connection removes.
func (c *counted) Receive() ([]netlink.Message, error) {
	m, err := c.real.Receive()
	var errno unix.Errno
	if errors.As(err, &errno) { // as the kernel sent it
		data := append(binary.NativeEndian.AppendUint32(nil, uint32(-int32(errno))), make([]byte, unix.NLMSG_HDRLEN)...)
		return []netlink.Message{{Header: netlink.Header{Type: netlink.Error, Sequence: c.last}, Data: data}}, nil
	}
	return append(m, netlink.Message{
		Header: netlink.Header{Type: netlink.Done, Flags: netlink.Multi, Sequence: c.last},
	}), err
}

func (c *counted) ReceiveIter() iter.Seq2[netlink.Message, error] {
	return func(yield func(netlink.Message, error) bool) {
		all, err := c.Receive()
		for _, m := range all {
			if !yield(m, nil) {
				return
			}
		}
		if err != nil {
			yield(netlink.Message{}, err)
		}
	}
}

// Our rules, and other programs', are read once, for all that a command says.
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
	if _, err := k.Apply(t.Context(), wants(t, "nonMasqueradeCIDRs: [10.0.0.0/8]\n"), layout.Everything); err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"status", "diff", "connections --stale"} {
		lists := map[string]int{}
		var stdout, stderr bytes.Buffer
		e := testEnvironment(t, &stdout, &stderr)
		e.kernel = func() *kernel.Kernel {
			return kernel.New(nfnetlink.New(func() (*netlink.Conn, error) {
				nl, err := netlink.Dial(unix.NETLINK_NETFILTER, nil) // on the node's thread
				if err != nil {
					return nil, err
				}
				return netlink.NewConn(&counted{real: nl, lists: lists}, nl.PID()), nil
			}), nil)
		}
		n.check(n.Do(func() error {
			if code := dispatch(
				t.Context(),
				testCommands(),
				append(strings.Fields(line), "--config", n.path),
				e,
			); code == exitUsage {
				t.Errorf("%s: exit code %d: %s%s", line, code, &stdout, &stderr)
			}
			return nil
		}))
		for _, list := range []string{
			"rules inet " + nft.TableName, "elements inet " + nft.TableName + " non-masq-v4-a",
			"rules ip other post", "rules ip other more", "elements ip other some",
		} {
			if lists[list] != 1 {
				t.Errorf("%s read the %s %d times", line, list, lists[list])
			}
		}
		for list, times := range lists {
			if times > 1 {
				t.Errorf("%s read the %s %d times", line, list, times)
			}
		}
	}
}

package nfttest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfttest/netns"
)

// DialNetfilter opens a socket of nf_tables in a namespace, for use by any thread, with
// buffers that hold what a test sends at once.
func DialNetfilter(n *NS) (*netlink.Conn, error) {
	nl, err := netns.In(n, func() (*netlink.Conn, error) {
		return netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{MessageBufferSize: 32 << 10})
	})
	if err != nil {
		return nil, err
	}
	return nl, errors.Join(nl.SetWriteBuffer(8<<20), nl.SetReadBuffer(1<<20))
}

const persist = 1 << 2 // NFT_TABLE_F_PERSIST

// Own creates a table that belongs to the socket of the returned connection: when that is
// closed, the table is deleted, or with the flag persist stays. The test is skipped if the
// kernel does not know the flags: owner is of Linux 5.12, and persist of 6.9.
func Own(tb testing.TB, n *NS, family byte, table string, flags uint32) *netlink.Conn {
	tb.Helper()
	nl, err := DialNetfilter(n)
	NoError(tb, err)
	body, _ := netlink.MarshalAttributes([]netlink.Attribute{
		{Type: unix.NFTA_TABLE_NAME, Data: append([]byte(table), 0)},
		{Type: unix.NFTA_TABLE_FLAGS, Data: binary.BigEndian.AppendUint32(nil, flags)},
	})
	message := func(typ netlink.HeaderType, flags netlink.HeaderFlags, data []byte) netlink.Message {
		return netlink.Message{Header: netlink.Header{Type: typ, Flags: netlink.Request | flags}, Data: data}
	}
	_, err = nl.SendMessages([]netlink.Message{
		message(unix.NFNL_MSG_BATCH_BEGIN, 0, []byte{0, 0, 0, unix.NFNL_SUBSYS_NFTABLES}),
		message(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWTABLE, netlink.Create|netlink.Acknowledge,
			append([]byte{family, 0, 0, 0}, body...)),
		message(unix.NFNL_MSG_BATCH_END, 0, []byte{0, 0, 0, unix.NFNL_SUBSYS_NFTABLES}),
	})
	if err == nil {
		_, err = nl.Receive()
	}
	switch {
	case err == nil:
		return nl
	case KernelBefore(tb, 5, 12) || flags&persist != 0 && KernelBefore(tb, 6, 9):
		tb.Skipf("this kernel has no tables with flags %d: %v", flags, err)
	}
	tb.Fatal(err)
	return nil
}

// KernelBefore reports whether the kernel is older than a version.
func KernelBefore(tb testing.TB, major, minor int) bool {
	tb.Helper()
	var name unix.Utsname
	NoError(tb, unix.Uname(&name))
	var gotMajor, gotMinor int
	if _, err := fmt.Sscanf(unix.ByteSliceToString(name.Release[:]), "%d.%d", &gotMajor, &gotMinor); err != nil {
		tb.Fatal(err)
	}
	return gotMajor < major || gotMajor == major && gotMinor < minor
}

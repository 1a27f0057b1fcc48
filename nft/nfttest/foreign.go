package nfttest

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// LoadForeign installs the rules of another program, which are the files of a directory in
// testdata/foreign, with edit applied to their text if it is not nil.
func LoadForeign(tb testing.TB, n *NS, dir string, edit func(string) string) {
	tb.Helper()
	for _, file := range []struct {
		name string
		load func(text string)
	}{
		{"ipsets.txt", func(text string) { restoreIPSets(tb, n, text) }},
		{"rules.iptables", func(text string) { Run(tb, n, text, "iptables-nft-restore", "--noflush") }},
		{"rules.ip6tables", func(text string) { Run(tb, n, text, "ip6tables-nft-restore", "--noflush") }},
		{"rules.nft", func(text string) { NFT(tb, n, text, "-f", "-") }},
	} {
		text, err := os.ReadFile(filepath.Join(dir, file.name))
		switch {
		case errors.Is(err, fs.ErrNotExist):
			continue
		case err != nil:
			tb.Fatal(err)
		case edit != nil:
			text = []byte(edit(string(text)))
		}
		file.load(string(text))
	}
}

// restoreIPSets does what ipset restore does with lines "create NAME TYPE family FAMILY" and
// "add NAME ADDRESS" or "add NAME PREFIX".
func restoreIPSets(tb testing.TB, n *NS, text string) {
	tb.Helper()
	nl, err := DialNetfilter(n)
	if err != nil {
		tb.Fatal(err)
	}
	defer nl.Close()
	for line := range strings.Lines(text) {
		if err := ipset(nl, strings.Fields(line)); err != nil {
			tb.Fatalf("%s: ipset %s: %v", n, strings.TrimSpace(line), err)
		}
	}
}

func ipset(nl *netlink.Conn, words []string) error {
	const (
		create, add = 2, 9 // IPSET_CMD_CREATE, IPSET_CMD_ADD
		// IPSET_ATTR_PROTOCOL and so on, of a command
		attrProtocol, attrName, attrType, attrRevision, attrFamily, attrData = 1, 2, 3, 4, 5, 7
		// IPSET_ATTR_IP and IPSET_ATTR_CIDR, of data; IPSET_ATTR_IPADDR_IPV4 is 1, _IPV6 is 2
		attrIP, attrCIDR = 1, 3
	)
	families := map[string]byte{"inet": unix.NFPROTO_IPV4, "inet6": unix.NFPROTO_IPV6}
	ae := netlink.NewAttributeEncoder()
	ae.Uint8(attrProtocol, 6)
	command, flags := create, netlink.Create // an equal set stays
	switch {
	case len(words) == 5 && words[0] == "create" && words[3] == "family":
		ae.String(attrName, words[1])
		ae.String(attrType, words[2])
		ae.Uint8(attrRevision, 0)
		ae.Uint8(attrFamily, families[words[4]])
		ae.Nested(attrData, func(*netlink.AttributeEncoder) error { return nil })
	case len(words) == 3 && words[0] == "add":
		if !strings.Contains(words[2], "/") {
			words[2] += map[bool]string{true: "/128", false: "/32"}[strings.Contains(words[2], ":")]
		}
		prefix, err := netip.ParsePrefix(words[2])
		if err != nil {
			return err
		}
		command, flags = add, 0
		ae.String(attrName, words[1])
		ae.Nested(attrData, func(data *netlink.AttributeEncoder) error {
			data.Nested(attrIP, func(ip *netlink.AttributeEncoder) error {
				ip.Bytes(map[bool]uint16{true: 1, false: 2}[prefix.Addr().Is4()]|unix.NLA_F_NET_BYTEORDER,
					prefix.Addr().AsSlice())
				return nil
			})
			data.Uint8(attrCIDR, uint8(prefix.Bits()))
			return nil
		})
	default:
		return errors.New("not understood")
	}
	attrs, err := ae.Encode()
	if err != nil {
		return err
	}
	_, err = nl.Execute(netlink.Message{
		Header: netlink.Header{
			Type:  netlink.HeaderType(unix.NFNL_SUBSYS_IPSET<<8 | command),
			Flags: netlink.Request | netlink.Acknowledge | flags,
		},
		Data: append([]byte{unix.NFPROTO_IPV4, 0, 0, 0}, attrs...),
	})
	if err != nil {
		return fmt.Errorf("netlink: %w", err)
	}
	return nil
}

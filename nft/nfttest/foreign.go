package nfttest

import (
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
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
	h, err := n.Netlink()
	NoError(tb, err)
	for line := range strings.Lines(text) {
		err := errors.New("not understood")
		switch words := strings.Fields(line); {
		case len(words) == 5 && words[0] == "create" && words[3] == "family":
			family := map[string]uint8{"inet": unix.AF_INET, "inet6": unix.AF_INET6}[words[4]]
			err = h.IpsetCreate(words[1], words[2], netlink.IpsetCreateOptions{Family: family, Replace: true})
		case len(words) == 3 && words[0] == "add":
			address, bits, found := strings.Cut(words[2], "/")
			addr := netip.MustParseAddr(address)
			length := addr.BitLen()
			if found {
				length, _ = strconv.Atoi(bits)
			}
			err = h.IpsetAdd(words[1], &netlink.IPSetEntry{IP: addr.AsSlice(), CIDR: uint8(length), Replace: true})
		}
		if err != nil {
			tb.Fatalf("%s: ipset %s: %v", n, strings.TrimSpace(line), err)
		}
	}
}

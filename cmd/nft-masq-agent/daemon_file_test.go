package main

import (
	"strings"
	"testing"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
)

// exempting returns a config that exempts only these CIDRs.
func exempting(cidrs ...string) string {
	return "masqLinkLocal: true\nnonMasqueradeCIDRs:\n  - " + strings.Join(cidrs, "\n  - ") + "\n"
}

// inEachMode runs a test in both modes, with the flag for it.
func inEachMode(t *testing.T, test func(t *testing.T, mode nft.Mode, flag string)) {
	t.Helper()
	for _, mode := range modes {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			test(t, mode, "--mode="+string(mode))
		})
	}
}

func TestCommandLineOfAnOlderAgentIsAccepted(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	args := []string{
		"--config=" + n.path, "--masq-chain=IP-MASQ", "--nomasq-all-reserved-ranges", "--enable-ipv6=true",
		"--random-fully=false", "--to-ports=1024-29999,32768-65535", "--v=2", "--logtostderr=false", "--log_file=/var/log/x",
	}
	n.swap("forceMasqueradeCIDRs: [10.1.0.0/16]\n")
	d := n.startCommand(n.command(nil, args...))
	d.await("log_file_ignored")
	d.began(wants(t, "forceMasqueradeCIDRs: [10.1.0.0/16]\n", args...))
	d.silent()
	listing := nfttest.NFT(t, n.NS, "", "list", "table", "inet", nft.TableName)
	if !strings.Contains(listing, "10.1.0.0/16") || !strings.Contains(listing, "fe80::/10") {
		t.Errorf("listing:\n%s", listing)
	}
	nfttest.NFT(t, n.NS, listing, "-c", "-f", "-") // it loads again
}

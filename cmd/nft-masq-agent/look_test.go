package main

import (
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/config"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
)

// What commands say that run in this process, next to no agent, or to a report in place of one.
func TestCommandsThatLookSayWhatTheyFind(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft", "ip", "iptables-legacy")
	all := situations(t, "look")
	for part := range slices.Chunk(all[1:], len(all)/2) {
		t.Run("part", func(t *testing.T) {
			t.Parallel()
			node := newTwoUplinks(t)
			for _, s := range append([]situation{all[0]}, part...) {
				t.Run(s.place, func(t *testing.T) {
					defer func(all testing.TB) { node.t = all }(node.t)
					node.t = t
					node.swap("") // the last one's
					(&faultyNode{trafficNode: node, situation: s, proc: t.TempDir()}).play()
					node.empty()
				})
			}
		})
	}
}

// empty deletes all connections and rules.
func (n trafficNode) empty() {
	n.t.Helper()
	n.forget()
	n.flush()
}

// forget deletes all connections.
func (n trafficNode) forget() {
	n.t.Helper()
	nl, err := nfttest.DialNetfilter(n.NS)
	n.check(err)
	defer nl.Close()
	const deletes = unix.NFNL_SUBSYS_CTNETLINK<<8 | 2 // IPCTNL_MSG_CT_DELETE
	_, err = nl.Execute(netlink.Message{
		Header: netlink.Header{Type: deletes, Flags: netlink.Request | netlink.Acknowledge}, Data: make([]byte, 4),
	})
	n.check(err)
}

// flush deletes all tables.
func (n *testNode) flush() {
	n.t.Helper()
	c := n.connect()
	defer c.Close()
	b := &nfnetlink.Batch{}
	for _, family := range []nfnetlink.Family{
		nfnetlink.IPv4, nfnetlink.IPv6, nfnetlink.Inet, unix.NFPROTO_BRIDGE, unix.NFPROTO_NETDEV,
	} {
		tables, err := c.Tables(family)
		n.check(err)
		for _, table := range tables {
			b.DelTable(family, table.Name)
		}
	}
	n.check(c.Commit(b))
}

// report answers in place of an agent, until the case ends.
func (n *faultyNode) report(text string) {
	n.t.Helper()
	var r running.Report
	n.check(json.Unmarshal([]byte(text), &r))
	r.ConfigPath, r.Files = n.path, []config.Source{{Name: n.path, Data: []byte(n.config)}}
	n.answer(r)
}

// What cannot be read is an error, or the answer says what it is from.
func TestCommandsSayWhatTheyCannotRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config")
	const cidrs, snat = "nonMasqueradeCIDRs: [10.0.0.0/8]\n", "snatAddresses: [192.0.2.1]\n"
	for _, tt := range []struct {
		config, args string
		unread       string // besides the kernel
		code         int
		says         string
	}{
		{cidrs, "status", "", exitFailed, "no kernel in this test\n"},
		{cidrs, "explain 10.1.2.3", "", exitDone, "no kernel in this test; the answer is from the config only\n"},
		{cidrs, "explain 10.1.2.3 -o json", "", exitDone, `"code":"should"`},
		{"nonMasqueradeCIDRs: 1\n", "explain 10.1.2.3", "", exitFailed, "config:1:21: "},
		{cidrs, "explain 10.1.2.3", "addresses", exitDone, "this agent does not masquerade it"},
		{snat, "explain 10.1.2.3", "addresses", exitFailed, "nft-masq-agent explain: no addresses\n"},
		{snat, "status", "addresses", exitFailed, "nft-masq-agent status: no addresses\n"},
		{snat, "diff", "addresses", exitUsage, "nft-masq-agent diff: no addresses\n"},
		{snat, "connections", "addresses", exitFailed, "nft-masq-agent connections: no addresses\n"},
	} {
		nfttest.NoError(t, os.WriteFile(path, []byte(tt.config), 0o600))
		var out strings.Builder
		e := testEnvironment(t, &out, &out)
		if tt.unread != "" {
			e.addresses = func() ([]netip.Addr, error) { return nil, errors.New("no " + tt.unread) }
		}
		var code int
		onNode(t, func() {
			code = dispatch(t.Context(), commands(), append(strings.Fields(tt.args), "--config", path), e)
		})
		if code != tt.code || !strings.Contains(out.String(), tt.says) {
			t.Errorf("%q, %s: exit code %d, want %d and %q:\n%s", tt.config, tt.args, code, tt.code, tt.says, out.String())
		}
	}
}

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
)

// badText is a rejected config, with its problem after the file name.
const (
	badText    = "nonMasqueradeCIDRs: [10.0.0.1]\n"
	badProblem = `:1:22: "10.0.0.1" is an address, not a CIDR: write "10.0.0.1/32"`
)

// kernelText returns the ruleset, to compare later that it has not changed.
func (n *testNode) kernelText() string {
	n.t.Helper()
	return nfttest.NFT(n.t, n.NS, "", "-a", "list", "ruleset")
}

func TestBadFileKeepsTheRulesOfThePreviousRun(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	for _, left := range modes {
		for _, now := range modes {
			t.Run(fmt.Sprintf("%s over %s", now, left), func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				loadLegacy(n)
				text := exempting("10.1.0.0/16", "10.2.0.0/16") + "forceMasqueradeCIDRs: [10.1.2.0/24]\n"
				n.swap(text)
				previous, flags := n.start("--mode="+string(left)), []string{"--mode=" + string(now), "--takeover"}
				previous.await("config_applied")
				previous.stop()
				before := n.kernelText()

				n.swap(badText)
				d := n.start(flags...)
				old := wants(t, text, "--mode="+string(left))
				d.await("starting")
				d.awaitRejection("config of a previous run (" + old.Hash() + ") stays enforced")
				if diff := cmp.Diff(before, n.kernelText()); diff != "" {
					t.Errorf("the kernel (-before +after):\n%s", diff)
				}
				tamper(n, left) // now they are gone, and those of the older agent decide
				if line := d.await("config_source_changed"); line["source"] != "foreign" || line["previous_source"] != "previous" {
					t.Errorf("decided again: %v", line)
				}
				if listing := nfttest.ListRuleset(t, n.NS); !strings.Contains(listing, "MY-MASQ") {
					t.Errorf("taken over:\n%s", listing)
				}

				n.swap(text)
				line := d.applied("start", wants(t, text, flags...))
				if !strings.Contains(line.Texts("taken_over"), "MY-MASQ") {
					t.Errorf("taken over: %v", line)
				}
				listing := nfttest.ListRuleset(t, n.NS)
				for word, left := range map[string]bool{
					"MY-MASQ": false, "table inet": now == nft.ModeNFTables, "IP-MASQ-AGENT": now == nft.ModeIPTables,
				} {
					if strings.Contains(listing, word) != left {
						t.Errorf("%s is left:\n%s", word, listing)
					}
				}
			})
		}
	}
}

// tamper removes our rules.
func tamper(n *testNode, mode nft.Mode) {
	n.t.Helper()
	if mode == nft.ModeNFTables {
		nfttest.NFT(n.t, n.NS, "", "delete", "table", "inet", nft.TableName)
		return
	}
	nfttest.NFT(n.t, n.NS, "", "flush", "chain", "ip", "nat", "IP-MASQ-AGENT")
}

// loadLegacy loads the rules of an older agent with a different chain name.
func loadLegacy(n *testNode) {
	n.t.Helper()
	rules, err := os.ReadFile(filepath.Join(root, "testdata/foreign/ip-masq-agent-custom-chain/rules.iptables"))
	n.check(err)
	nfttest.Run(n.t, n.NS, string(rules), "iptables-nft-restore", "--noflush")
}

func TestNonRegularConfigDoesNotPreventTheStart(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	for says, makeConfig := range map[string]func(*testNode) error{
		"PATH: not a regular file (named pipe)":       func(n *testNode) error { return unix.Mkfifo(n.path, 0o644) },
		"PATH: not a regular file (character device)": func(n *testNode) error { return os.Symlink("/dev/zero", n.path) },
		"open PATH/a.yaml: permission denied": func(n *testNode) error {
			return errors.Join(os.Mkdir(n.path, 0o755), os.WriteFile(filepath.Join(n.path, "a.yaml"), nil, 0))
		},
		// The kernel returns EIO for unmapped addresses.
		"read PATH: input/output error": func(n *testNode) error { return os.Symlink("/proc/self/mem", n.path) },
	} {
		n := newNode(t)
		n.check(makeConfig(n))
		// As in the pod: without CAP_DAC_OVERRIDE, which reads everything.
		d := n.startIn([]string{fmt.Sprintf("%s=[%d]", withCaps, unix.CAP_NET_ADMIN)})
		d.began(wants(t, ""))
		line := d.awaitRejection("built-in defaults")
		if want := strings.ReplaceAll("config: "+says, "PATH", n.path); !strings.HasPrefix(line.Text("error"), want) {
			t.Errorf("rejected: %v, want %q", line, want)
		}
		n.check(os.Rename(n.path, n.path+".old"))
		n.swap(exempting("10.1.0.0/16"))
		for line = d.await("config_applied"); line["hash"] != wants(t, exempting("10.1.0.0/16")).Hash(); {
			line = d.await("config_applied")
		}
		n.holds(wants(t, exempting("10.1.0.0/16")))
	}
}

func TestMissingNetAdminIsNamedAndRetried(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	inEachMode(t, func(t *testing.T, _ nft.Mode, flag string) {
		n := newNode(t)
		before := n.generation()
		d := n.startIn([]string{withCaps + "=[]"}, flag, "--http-address", httpAddress)
		d.await("starting")
		d.answers()
		line := d.await("rules_unreadable")
		if !strings.Contains(line.Text("hint"), "NET_ADMIN") || strings.Contains(line.Text("message"), "previous rules") {
			t.Errorf("refused: %v", line)
		}
		d.until("further tries", func() bool {
			tries, _ := strconv.Atoi(n.metric(`nft_masq_agent_applies_total{reason="retry",result="refused"}`))
			return tries >= nfttest.Rounds(1, 2, 2)
		})
		if code, body := n.get("/readyz"); code != 503 || !strings.Contains(body, "NET_ADMIN") {
			t.Errorf("readyz returned %d %s", code, body)
		}
		if code, body := n.get("/healthz"); code != 200 {
			t.Errorf("healthz returned %d %s", code, body)
		}
		if after := n.generation(); after != before {
			t.Errorf("generation %d, was %d", after, before)
		}
		d.forgive("second_agent")
		d.silent() // once, not for each attempt
		d.stop()
	})
}

// TestRejectedRulesAreRetriedUntilAccepted makes another program own the table:
// then the kernel rejects changes until that program exits.
func TestRejectedRulesAreRetriedUntilAccepted(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	inEachMode(t, func(t *testing.T, mode nft.Mode, flag string) {
		const owned = 2 // NFT_TABLE_F_OWNER, since Linux 5.12
		n := newNode(t)
		family, table := nfnetlink.Inet, nft.TableName
		if mode == nft.ModeIPTables {
			family, table = nfnetlink.IPv4, "nat"
		}
		owner := nfttest.Own(t, n.NS, byte(family), table, owned)
		defer func() { _ = owner.Close() }()

		d := n.start(flag, "--http-address", httpAddress)
		d.await("starting")
		d.answers()
		line := d.await("rules_rejected")
		if line["level"] != "error" || !strings.Contains(line.Text("error"), "operation not permitted") ||
			!strings.Contains(line.Text("hint"), "another process owns the table") {
			t.Errorf("refused: %v", line)
		}
		d.until("a second try", func() bool {
			return n.number(`nft_masq_agent_applies_total{reason="retry",result="refused"}`) >= 1
		})
		if code, body := n.get("/readyz"); code != 503 || !strings.HasPrefix(body, "the kernel rejected the rules: ") {
			t.Errorf("readyz returned %d %s", code, body)
		}
		d.silent()
		// A config from the meantime is the one that applies.
		n.swap(exempting("10.1.0.0/16"))
		d.until("the check of the new file", func() bool {
			return n.number(`nft_masq_agent_applies_total{reason="config",result="refused"}`)+
				n.number(`nft_masq_agent_applies_total{reason="start",result="refused"}`) >= 2
		})
		n.check(owner.Close()) // its table is deleted with it
		d.await("rules_accepted")
		d.await("config_applied")
		d.await("config_file_appeared")
		n.holds(wants(t, exempting("10.1.0.0/16"), flag))
		d.until("it is ready", func() bool { code, _ := n.get("/readyz"); return code == 200 })
		d.silent()
		d.stop()
	})
}

func TestNetAdminIsTheOnlyRequiredCapability(t *testing.T) {
	t.Parallel()
	for _, disabled := range []string{"0", "1"} { // IPv6, by the node
		inEachMode(t, func(t *testing.T, _ nft.Mode, flag string) {
			n := newNode(t)
			n.check(n.Sysctl("net.ipv6.conf.all.disable_ipv6", disabled))
			d := n.startIn([]string{fmt.Sprintf("%s=[%d]", withCaps, unix.CAP_NET_ADMIN)}, flag, "--enable-ipv6")
			want := wants(t, "", flag, "--enable-ipv6")
			d.began(want)
			nfttest.NFT(t, n.NS, "", "flush", "ruleset")
			d.await("rules_restored")
			n.holds(want)
			d.forgive("second_agent")
			d.silent()
			d.stop()
		})
	}
}

func TestSecondAgentIsReported(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	first := n.start()
	first.began(wants(t, ""))
	other := &testNode{n.NS, t, n.path, n.socket + "-second"}
	second := other.start("--resync-interval=1", "--http-address", httpAddress)
	line := second.await("second_agent")
	if line["pid"] != float64(first.Pid) {
		t.Errorf("named: %v, want pid %d", line, first.Pid)
	}
	second.await("starting")
	second.await("rules_in_place")
	second.silent()
	first.silent()
	for _, of := range []*testNode{n, other} { // whichever is asked
		got := of.run("status")
		if got.code != exitFailed || !strings.HasPrefix(unwrap(got.stdout), "2 agents run here and overwrite each other") {
			t.Errorf("status: %+v", got)
		}
	}
	if got := n.metric("nft_masq_agent_second_agent"); got != "1" {
		t.Errorf("metric: %q", got)
	}
	first.stop()
	second.await("second_agent_gone")
	if got := n.metric("nft_masq_agent_second_agent"); got != "0" {
		t.Errorf("metric: %q after its end", got)
	}
	if got := other.run("status"); got.code != exitDone {
		t.Errorf("status after its end: %+v", got)
	}
	n.start().await("second_agent") // the second one has the lock now
}

func TestRulesOfAnOlderAgentAreReportedAndTakenOver(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	inEachMode(t, func(t *testing.T, mode nft.Mode, flag string) {
		n := newNode(t)
		loadLegacy(n)
		d := n.start(flag, "--http-address", httpAddress)
		d.await("config_applied")
		d.answers()
		line := d.await("legacy_rules_active")
		if !strings.Contains(line.Texts("found"), "MY-MASQ") {
			t.Errorf("logged: %v", line)
		}
		// By default, the other mode also uses random-fully.
		if note := line.Text("note"); strings.Contains(note, "random") != (mode == nft.ModeIPTables) {
			t.Errorf("logged: %v", line)
		}
		line = d.await("foreign_masquerade")
		if line["table"] != "ip nat" || line["chain"] != "MY-MASQ" ||
			!strings.Contains(line.Text("rule"), "MASQUERADE --random-fully") {
			t.Errorf("logged: %v", line)
		}
		d.until("the metric", func() bool { return n.metric("nft_masq_agent_legacy_chains") == "1" })
		d.stop()
		d = n.start(flag, "--takeover")
		line = d.applied("start", wants(t, "", flag))
		if !strings.Contains(line.Texts("taken_over"), "MY-MASQ") {
			t.Errorf("taken over: %v", line)
		}
		if listing := nfttest.ListRuleset(t, n.NS); strings.Contains(listing, "MY-MASQ") {
			t.Errorf("left:\n%s", listing)
		}
		d.await("starting")
		d.silent()
	})
}

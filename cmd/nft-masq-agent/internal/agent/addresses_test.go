package agent

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/node"
)

func addrs(list string) (all []netip.Addr) {
	for _, a := range strings.Fields(list) {
		all = append(all, netip.MustParseAddr(a))
	}
	return all
}

// lists sets the addresses that the node has, of which the agent does not hear.
func (w *world) lists(list string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.addresses, w.unlisted = addrs(list), nil
}

func (w *world) listed() ([]netip.Addr, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.addresses, w.unlisted
}

func (w *world) moved(list string) {
	w.lists(list)
	w.moves <- node.Change{Addresses: addrs(list)}
	synctest.Wait()
}

func snatFile() Files {
	return Files{Sources: []config.Source{{
		Name: "config",
		Data: []byte("snatAddresses: [198.51.100.11, 198.51.100.64/29]\n"),
	}}}
}

const (
	movedText   = "the addresses of this node changed; connections leave from those that it has"
	missingText = "this node has none of snatAddresses: connections are masqueraded with the address of the interface"
	foundText   = "this node has one of snatAddresses again"
)

func TestAddressesAreFollowedWhenAPolicyNeedsThem(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.gets(file("10.0.0.0/8"))
		if w.follows != 0 {
			t.Error("the addresses are followed needlessly")
		}
		wantMetrics(t, w.agent, "snat_addresses{state=\"absent\"} 0\nsnat_addresses{state=\"present\"} 0\n", "snat_addresses")
		w.lists("192.0.2.1 198.51.100.65")
		w.messages()
		w.gets(snatFile())
		wantLines(t, w.messages(), "applied")
		wantMetrics(t, w.agent, "snat_addresses{state=\"absent\"} 1\nsnat_addresses{state=\"present\"} 1\n", "snat_addresses")
		writes := len(w.writes)
		w.moved("192.0.2.1 192.0.2.2 198.51.100.65") // none in the list
		if len(w.writes) != writes {
			t.Errorf("wrote %v", w.writes[writes:])
		}
		wantLines(t, w.messages())

		w.moved("192.0.2.1 198.51.100.11 198.51.100.66")
		wantLines(t, w.messages(), movedText)
		if !strings.HasSuffix(w.held, "[198.51.100.11 198.51.100.66]") {
			t.Errorf("the kernel has %s", w.held)
		}
		wantMetrics(t, w.agent, "snat_addresses{state=\"absent\"} 0\nsnat_addresses{state=\"present\"} 2\n", "snat_addresses")
		w.moved("192.0.2.1")
		wantLines(t, w.messages(), movedText, missingText)
		w.moved("")
		pass(10 * time.Minute)
		wantLines(t, w.messages())
		w.moved("198.51.100.11")
		wantLines(t, w.messages(), movedText, foundText)
		wantMetrics(t, w.agent, "drift_repairs_total 0\n", "drift_repairs_total")
		if w.follows != 1 {
			t.Errorf("followed %d times", w.follows)
		}
	})
}

func TestEntriesWithoutAnAddressOfTheNodeAreCounted(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.lists("192.0.2.1 198.51.100.21 198.51.100.65")
		w.files <- Files{Sources: []config.Source{{Name: "config", Data: []byte("enableIPv6: true\nsnatRules:\n" +
			"- {from: [10.244.8.0/24], addresses: [198.51.100.21, 198.51.100.22]}\n" +
			"- {to: [203.0.113.0/24], addresses: [198.51.100.30]}\n" +
			"- {out: [eth1], addresses: [198.51.100.64/29, \"2001:db8:5::1\"]}\n")}}}
		synctest.Wait()
		wantMetrics(t, w.agent, "snat_rules{state=\"absent\"} 1\nsnat_rules{state=\"present\"} 2\n", "snat_rules")
		w.moved("192.0.2.1 198.51.100.30")
		wantMetrics(t, w.agent, "snat_rules{state=\"absent\"} 2\nsnat_rules{state=\"present\"} 1\n", "snat_rules")
		w.moved("192.0.2.1 198.51.100.22 198.51.100.30 2001:db8:5::1")
		wantMetrics(t, w.agent, "snat_rules{state=\"absent\"} 0\nsnat_rules{state=\"present\"} 3\n", "snat_rules")
	})
}

func TestKnownAddressesStayWhenTheyCannotBeRead(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.unlisted = unix.ENOBUFS
		w.gets(snatFile())
		if err := w.agent.Ready(); !errors.Is(err, unix.ENOBUFS) || len(w.writes) != 0 {
			t.Errorf("ready: %v, wrote %v", err, w.writes)
		}
		w.lists("198.51.100.11")
		pass(time.Minute)
		if err := w.agent.Ready(); err != nil || !strings.HasSuffix(w.held, "[198.51.100.11]") {
			t.Errorf("ready: %v, the kernel has %s", err, w.held)
		}
		w.messages()
		for range 3 {
			w.moves <- node.Change{Err: unix.EMFILE}
			synctest.Wait()
		}
		wantLines(t, w.messages(), "cannot follow the addresses of this node; retrying, with the last known addresses "+
			"until then")
		if !strings.HasSuffix(w.held, "[198.51.100.11]") {
			t.Errorf("the kernel has %s", w.held)
		}
		// A resync lists them.
		w.lists("198.51.100.65")
		pass(2 * time.Minute)
		if !strings.HasSuffix(w.held, "[198.51.100.65]") {
			t.Errorf("the kernel holds %s", w.held)
		}
		wantLines(t, w.messages(), movedText)
	})
}

// A rejected ruleset is retried with the current addresses.
func TestRejectedAddressesAreRetried(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.lists("198.51.100.11 198.51.100.65")
		w.gets(snatFile())
		w.messages()
		w.refuse(&nfnetlink.RefusedError{Op: nfnetlink.CreateRule, Err: unix.ENOMEM})
		w.moved("198.51.100.65")
		w.refuse(nil)
		w.moved("198.51.100.65 198.51.100.66")
		pass(time.Minute)
		if !strings.HasSuffix(w.held, "[198.51.100.65 198.51.100.66]") {
			t.Errorf("the kernel has %s", w.held)
		}
		wantLines(t, w.messages(), "kernel rejected the rules; previous rules stay, retrying",
			"kernel accepted the rules again", movedText)
	})
}

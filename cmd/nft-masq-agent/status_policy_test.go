package main

import (
	"fmt"
	"strings"
	"testing"

	"nft-masq-agent/cmd/nft-masq-agent/internal/report"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
)

func TestStatusShowsSinceWhenThePolicyIsEnforced(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	n := newNode(t)
	first := exempting("10.1.0.0/16", "10.2.0.0/16")
	n.swap(first)
	d := n.start()
	d.began(wants(t, first))
	policy := func(what, why, config string) report.Policy {
		t.Helper()
		r, _ := n.status()
		if r.Agent == nil || r.Agent.Policy == nil {
			t.Fatalf("the agent did not say: %+v", r.Agent)
		}
		p := *r.Agent.Policy
		if p.What != what || p.Why != why || p.Hash != wants(t, config).Hash() || p.Since.IsZero() ||
			p.Changed.Before(p.Since) {
			t.Errorf("%+v, want %s (%s)", p, what, why)
		}
		return p
	}
	started := policy("rules installed", "start", first)
	second := exempting("10.2.0.0/16", "10.3.0.0/16", "10.4.0.0/16")
	n.swap(second)
	d.await("config_applied")
	changed := policy(fmt.Sprintf("policy %s replaced, entries added: 2, removed: 1", started.Hash), "config", second)
	if !changed.Since.After(started.Since) {
		t.Errorf("since %s, before that since %s", changed.Since, started.Since)
	}
	nfttest.NFT(t, n.NS, "", "flush", "chain", "inet", nft.TableName, "postrouting")
	line := d.await("rules_restored")
	restored := policy(fmt.Sprintf("rules restored, differences: %v", line["differences"]), "changed by another program",
		second)
	if !restored.Since.Equal(changed.Since) || !restored.Changed.After(changed.Changed) {
		t.Errorf("restored: %+v, before that %+v", restored, changed)
	}
	if text := n.run("status").stdout; !strings.Contains(text, restored.String()) {
		t.Errorf("no %q in\n%s", restored, text)
	}
	d.stop()
	if r, _ := n.status(); r.Agent != nil {
		t.Errorf("after its end: %+v", r.Agent)
	}
}

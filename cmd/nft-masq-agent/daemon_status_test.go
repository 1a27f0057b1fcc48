package main

import (
	"encoding/json"
	"strings"
	"testing"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/report"
	"nft-masq-agent/nft"
)

// status returns the report of status -o json, and the exit code.
func (n *testNode) status(args ...string) (r answer.Status, code int) {
	n.t.Helper()
	got := n.run(append([]string{"status", "-o", "json"}, args...)...)
	d := json.NewDecoder(strings.NewReader(got.stdout))
	d.DisallowUnknownFields()
	if err := d.Decode(&r); err != nil || got.stderr != "" {
		n.t.Fatalf("status: %+v: %v", got, err)
	}
	return r, got.code
}

// problems returns the problems of a kind that status reports.
func problems(r answer.Status, id string) (texts []string) {
	for _, p := range r.Problems() {
		if strings.HasPrefix(p.ID, id) {
			texts = append(texts, p.Error())
		}
	}
	return texts
}

// unwrap joins wrapped lines.
func unwrap(text string) string { return strings.Join(strings.Fields(text), " ") }

// A policy is enforced since it was applied, whatever was restored after that.
func TestStatusSaysSinceWhenAPolicyIsEnforced(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	d := n.start()
	d.await("config_applied")
	policy := func() report.Policy {
		r, _ := n.status()
		return *r.Agent.Policy
	}
	started := policy()
	n.swap(exempting("10.2.0.0/16"))
	d.await("config_applied")
	changed := policy()
	tamper(n, nft.ModeNFTables)
	d.await("rules_restored")
	restored := policy()
	if !changed.Since.After(started.Since) || !restored.Since.Equal(changed.Since) ||
		!restored.Changed.After(changed.Changed) {
		t.Errorf("%+v, then %+v, then %+v", started, changed, restored)
	}
}

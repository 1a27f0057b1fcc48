package main

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/nft/nfttest"
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

func TestForeignChainIsRejected(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "iptables-nft-restore")
	n := newNode(t)
	const rules = "*nat\n:KUBE-POSTROUTING - [0:0]\n-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN\nCOMMIT\n"
	if _, err := n.Output(rules, "iptables-nft-restore", "--noflush"); err != nil {
		t.Fatal(err)
	}
	flags, before := []string{"--mode=iptables-nft", "--masq-chain=KUBE-POSTROUTING"}, n.kernelText()
	r, code := n.status(flags...)
	want := `chain "KUBE-POSTROUTING" in table ip nat: the chain has rules that no masquerade agent wrote`
	if code != exitFailed || len(r.Counters) > 0 || !slices.Equal(r.Kernel.Differences, []string{want}) {
		t.Errorf("exit code %d: %+v", code, r)
	}
	got := n.run(append([]string{"run", "--config", n.path}, flags...)...)
	want = "nft-masq-agent run: --masq-chain: " + want + " (see nft-masq-agent run --help)\n"
	if got.code != exitUsage || got.stderr != want || n.kernelText() != before {
		t.Errorf("%+v, want exit code %d and %s", got, exitUsage, want)
	}
}

// unwrap joins wrapped lines.
func unwrap(text string) string { return strings.Join(strings.Fields(text), " ") }

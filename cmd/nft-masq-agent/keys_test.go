package main

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

// The headline of explain is what the far end sees, or says what that depends on, whatever keys
// the config has, and whatever port the connection goes to. So is the answer of the policy, or one
// of several.
func TestHeadlineKnowsEachKey(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	n := newTrafficNode(t)
	for _, name := range []string{"udp_timeout", "udp_timeout_stream"} { // or a port of an earlier file has its verdict
		_ = n.top.Node.Sysctl("net.netfilter.nf_conntrack_"+name, "1")
	}
	cases.EachKey(t, func(t *testing.T, k cases.Key) {
		defer func(all testing.TB) { n.t = all }(n.t)
		n.t = t
		for _, text := range k.Files() {
			n.enforce(text)
			for _, dst := range []string{"10.9.0.9", "10.8.0.9", "203.0.113.9", "198.51.100.9", "2001:db8:1::1"} {
				src := n.podFor(netip.MustParseAddr(dst))
				var x answer.Explanation
				n.here(&x, "explain", dst, "--from", src.String(), "--config", n.path)
				for _, port := range []uint16{53, 7777} {
					seen, verdict := n.seen(netip.MustParseAddr(dst), port), nft.Masqueraded
					if seen == src {
						verdict = nft.Exempt
					}
					if n.judge(x, seen); t.Failed() {
						t.Fatalf("the headline (Explanation.Follow) is wrong about %s:\n%s", k.Name, text)
					}
					if !slices.ContainsFunc(x.Answers, func(a answer.Answer) bool { return a.Verdict == verdict }) {
						t.Fatalf("port %d of %s: %s, but the policy answers %+v: Explanation.Ask does not know %s:\n%s", port, dst,
							verdict, x.Answers, k.Name, text)
					}
				}
			}
		}
	})
}

// check says what a key is set to, and diff what another value changes: as text and as JSON, besides
// the hash. Values of other types than bool are named.
func TestCheckAndDiffNameEachKey(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	hash, name := regexp.MustCompile(`\b[0-9a-f]{8}\b`), regexp.MustCompile(`[0-9a-z][0-9a-z.:-]+`)
	run := func(args ...string) string { return hash.ReplaceAllString(runHere(t, args...).stdout, "HASH") }
	cases.EachKey(t, func(t *testing.T, k cases.Key) {
		if k.NoPolicy {
			return
		}
		var paths [2]string
		answers := map[string][2]string{}
		for i, text := range k.Files() {
			paths[i] = filepath.Join(dir, fmt.Sprint(k.Name, i))
			nfttest.NoError(t, os.WriteFile(paths[i], []byte(text), 0o644))
			for _, form := range []string{"text", "json"} {
				all := answers[form]
				all[i] = strings.ReplaceAll(run("check", paths[i], "-o", form), paths[i], "FILE")
				answers[form] = all
			}
		}
		for form, of := range answers {
			if of[0] == of[1] {
				t.Errorf("check -o %s does not tell %q from %q: newMeaning in internal/answer/check.go\n%s", form,
					k.Values[0], k.Values[1], of[0])
			}
			same, differ := run("diff", paths[0], paths[0], "-o", form), run("diff", paths[0], paths[1], "-o", form)
			named := false
			for _, value := range k.Values {
				for _, word := range name.FindAllString(value, -1) {
					named = named || word == "true" || word == "false" || strings.Contains(differ, word)
				}
			}
			if strings.ReplaceAll(differ, paths[1], paths[0]) == same || !named {
				t.Errorf("diff -o %s does not name %q or %q: NewDiff in internal/answer/diff.go\n%s", form, k.Values[0],
					k.Values[1], differ)
			}
		}
	})
}

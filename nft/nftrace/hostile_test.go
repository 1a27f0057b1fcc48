package nftrace_test

import (
	"bytes"
	"net/netip"
	"os"
	"strings"
	"testing"
	"unicode"

	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nftrace"
	"nft-masq-agent/nft/nfttest"
)

// hostile are names that the kernel accepts, for terminals, shells and nft.
var hostile = []string{
	"t;touch${IFS}x", "$(touch x)", "`touch x`", "a';touch x;'b", "a\ntouch x\n", "|touch x", "x; flush ruleset", "#",
	`"`, "two words", "-f", "\x1b[2J\x1b[8m", "\u009b1m", "\u202eabc", "a\xff", "\r10.9.0.9 sees nothing", "plain",
	kernel.TraceTable,
}

// masquerading returns the transaction that creates a table with a base chain, which jumps to a chain that masquerades.
func masquerading(table, base, chain, comment string) *nfnetlink.Batch {
	b := &nfnetlink.Batch{}
	b.AddTable(nfnetlink.IPv4, table)
	b.AddChain(nfnetlink.Chain{Family: nfnetlink.IPv4, Table: table, Name: chain})
	b.AddChain(nfnetlink.Chain{
		Family: nfnetlink.IPv4, Table: table, Name: base, Policy: nfnetlink.Accept,
		Hook: &nfnetlink.Hook{Type: "nat", Number: unix.NF_INET_POST_ROUTING, Priority: 100},
	})
	add := func(chain string, e expr.Any) {
		b.AddRule(nfnetlink.Rule{
			Family: nfnetlink.IPv4, Table: table, Chain: chain, Exprs: nfnetlink.Marshal(nfnetlink.IPv4, e),
			UserData: userdata.AppendString(nil, userdata.TypeComment, comment),
		})
	}
	add(base, &expr.Verdict{Kind: expr.VerdictJump, Chain: chain})
	add(chain, &expr.Masq{})
	return b
}

func TestHostileNamesAreNeitherObeyedNorExecuted(t *testing.T) {
	top := nfttest.NewTopology(t)
	for _, name := range hostile {
		for _, named := range []struct{ what, table, base, chain, comment, shell string }{
			{"chain", "table-1", "post", name, "all pods", "sh"},
			{"everything", name, name + "b", name, name, "bash"},
		} {
			t.Run(named.what+" "+name, func(t *testing.T) {
				if named.what != "everything" {
					nfttest.SkipIfShort(t)
				}
				commit(t, top.Node, masquerading(named.table, named.base, named.chain, named.comment))
				got := traceOne(t, top)
				rule := got.Rule
				if rule == nil || rule.Table != named.table || rule.Chain != named.chain || rule.Comment != named.comment {
					t.Fatalf("the rule is %+v", rule)
				}
				checkText(t, got)
				checkCommand(t, top.Node, named.shell, rule.Command)
				gone := &nfnetlink.Batch{}
				gone.DelTable(nfnetlink.IPv4, named.table)
				commit(t, top.Node, gone)
			})
		}
	}
}

func commit(t *testing.T, n *nfttest.NS, b *nfnetlink.Batch) {
	t.Helper()
	nfttest.In(t, n, func() (struct{}, error) {
		c := nfnetlink.Dial()
		defer func() { _ = c.Close() }()
		return struct{}{}, c.Commit(b)
	})
}

// traceOne traces a datagram from the pod.
func traceOne(t *testing.T, top *nfttest.Topology) nftrace.Trace {
	t.Helper()
	flow := nfttest.Flow{Proto: nfttest.UDP, From: top.Pod, Dst: netip.MustParseAddrPort("10.9.0.9:53")}
	var sendErr error
	got, err := trace(t, top, nftrace.Query{To: flow.Dst}, func() { _, sendErr = top.Send(flow) })
	if err != nil || sendErr != nil {
		t.Fatal(err, sendErr)
	}
	return got
}

// checkText checks that each line of the text is one that the trace has, with printable characters alone.
func checkText(t *testing.T, got nftrace.Trace) {
	t.Helper()
	text := got.String()
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	const want = 9 // headline, comment, command, remedy, an empty line, heading, base chain, its jump, masquerade
	if len(lines) != want {
		t.Errorf("%d lines, want %d:\n%q", len(lines), want, text)
	}
	for _, line := range lines {
		if strings.ContainsFunc(line, func(r rune) bool { return !unicode.IsPrint(r) || r == unicode.ReplacementChar }) {
			t.Errorf("the terminal would obey %q", line)
		}
	}
}

// checkCommand runs a command as if it were pasted, and checks that it shows the rule and does nothing else.
func checkCommand(t *testing.T, n *nfttest.NS, shell, command string) {
	t.Helper()
	before := nfttest.NFT(t, n, "", "-a", "list", "ruleset")
	cmd := nfttest.Command(shell, "-c", command)
	cmd.Dir = t.TempDir()
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := n.Run(cmd); err != nil || !strings.Contains(out.String(), "masquerade comment") {
		t.Errorf("%s -c %q: %v\n%q", shell, command, err, out.String())
	}
	if files, err := os.ReadDir(cmd.Dir); err != nil || len(files) > 0 {
		t.Errorf("%s -c %q created %v: %v", shell, command, files, err)
	}
	if after := nfttest.NFT(t, n, "", "-a", "list", "ruleset"); after != before {
		t.Errorf("%q changed the rules to\n%q", command, after)
	}
}

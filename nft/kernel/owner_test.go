package kernel

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
)

const (
	flagOwner   = 1 << 1 // NFT_TABLE_F_OWNER
	flagPersist = 1 << 2 // NFT_TABLE_F_PERSIST
)

// own creates a table that belongs to the socket of the returned connection: when
// that is closed, the table is deleted, or with the flag persist stays.
func own(t testing.TB, ns *nfttest.NS, family nfnetlink.Family, table string, flags uint32) *nfnetlink.Conn {
	t.Helper()
	nl := nfttest.Own(t, ns, byte(family), table, flags)
	c := nfnetlink.New(func() (*netlink.Conn, error) { return nl, nil })
	if _, err := c.Generation(); err != nil { // opens it
		t.Fatal(err)
	}
	return c
}

// A table of another process stays as it is. When that process closes its socket,
// the table vanishes, or stays without an owner; other programs' chains in a
// shared table then stay, too. It is not parallel: a program that another test is
// about to start has the socket for a moment.
func TestTableWithAnOwnerIsReportedAndThenReplaced(t *testing.T) {
	nfttest.SkipIfShort(t)
	const dormant = 1 << 0 // NFT_TABLE_F_DORMANT
	nfttest.Require(t, "nft")
	for mode, want := range map[nft.Mode]nft.Ruleset{
		nft.ModeNFTables: nft.Compile(tamperConfig(10), nft.Options{Layout: native.Layout{}}),
		nft.ModeIPTables: xtOf(tamperConfig(10)),
	} {
		for name, flags := range map[string]uint32{
			"owner": flagOwner, "persistent": flagOwner | flagPersist, "dormant": flagOwner | flagPersist | dormant,
		} {
			for _, running := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, %s, running %t", mode, name, running), func(t *testing.T) {
					replacesOwned(t, want, flags, running)
				})
			}
		}
	}
}

func replacesOwned(t *testing.T, want nft.Ruleset, flags uint32, running bool) {
	ns := nfttest.NewNS(t, "node")
	k := open(t, ns)
	table := want.Tables[0]
	if running {
		apply(t, k, want, everything)
		nfttest.NFT(t, ns, "", "delete", "table", table.Family.String(), table.Name)
	}
	owner := own(t, ns, table.Family, table.Name, flags)
	theirs := nfnetlink.Chain{Family: table.Family, Table: table.Name, Name: "theirs"}
	var b nfnetlink.Batch
	b.AddChain(theirs)
	if err := owner.Commit(&b, 0); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		_, err := k.Apply(t.Context(), want, layout.Ours)
		if !errors.Is(err, unix.EPERM) || !strings.Contains(Hint(err), "another process owns the table") {
			t.Errorf("Apply says %v; %q", err, Hint(err))
		}
	}
	if err := owner.Close(); err != nil {
		t.Fatal(err)
	}
	apply(t, k, want, layout.Ours)
	inSync(t, ns, want)
	chains, err := connect(t, ns).Chains(table.Family)
	if err != nil {
		t.Fatal(err)
	}
	kept := slices.ContainsFunc(chains, func(c nfnetlink.Chain) bool { return c.Name == theirs.Name })
	if shared := table.Name != nft.TableName; kept != (shared && flags&flagPersist != 0) {
		t.Errorf("the other program's chain exists: %t", kept)
	}
}

package older

import (
	"testing"

	"nft-masq-agent/nft/nfnetlink"
)

// A jump may be read before its chain is created, or after that is gone.
func TestChainsThatWereNotReadAreNotFound(t *testing.T) {
	at := nfnetlink.ChainID{Family: nfnetlink.IPv4, Table: "nat", Name: "IP-MASQ"}
	l := search{chains: map[nfnetlink.ChainID]*candidate{}}
	for range 2 {
		l.note(at)
	}
	if found := l.found(); len(found) > 0 {
		t.Errorf("found %v", found)
	}
	l.chains[at] = &candidate{}
	if found := l.found(); len(found) != 1 {
		t.Errorf("found %v", found)
	}
}

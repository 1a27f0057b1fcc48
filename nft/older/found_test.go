package older

import (
	"testing"

	"nft-masq-agent/nft/nfnetlink"
)

// A jump may be read before its chain is created, or after that is gone.
func TestChainsThatWereNotReadAreNotFound(t *testing.T) {
	at := id{nfnetlink.IPv4, "nat", "IP-MASQ"}
	l := search{chains: map[id]*candidate{}, agent: map[id]bool{}, order: []id{at}}
	if found := l.found(); len(found) > 0 {
		t.Errorf("found %v", found)
	}
	l.chains[at], l.order = &candidate{}, []id{at, at}
	if found := l.found(); len(found) != 1 {
		t.Errorf("found %v", found)
	}
}

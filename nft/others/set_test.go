package others

import (
	"testing"

	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
)

// An address in a register before the first one of the lookup is no part of what is looked up.
func TestAnAddressBeforeTheKeysIsInNoSet(t *testing.T) {
	s := &search{known: map[lookup]bool{}}
	if found, err := s.contains(lookup{name: "a", position: -4, address: "\x0a\x09\x00\x09"}); found || err != nil {
		t.Errorf("found %t: %v", found, err)
	}
}

func TestNoMoreElementsAreReadThanTheLimit(t *testing.T) {
	t.Parallel()
	n := nfttest.NewNode(t)
	nfttest.NFT(t, n, `table ip x {
		set a { type ipv4_addr; elements = { 10.9.0.9 }; }
		set b { type ipv4_addr; elements = { 10.9.0.9 }; }
	}`, "-f", "-")
	for _, tt := range []struct {
		elements int
		sets     string
		want     string
	}{{0, "ab", "ab"}, {maxElements - 1, "ab", "a"}} {
		got := nfttest.In(t, n, func() (found string, err error) {
			c := nfnetlink.Dial()
			defer func() { _ = c.Close() }()
			s := &search{sets: c, known: map[lookup]bool{}, elements: tt.elements}
			for _, set := range tt.sets {
				has, err := s.contains(lookup{family: nfnetlink.IPv4, table: "x", name: string(set), address: "\x0a\x09\x00\x09"})
				if err != nil {
					return found, err
				}
				if has {
					found += string(set)
				}
			}
			return found, nil
		})
		if got != tt.want {
			t.Errorf("after %d elements, of %s: %s, want %s", tt.elements, tt.sets, got, tt.want)
		}
	}
}

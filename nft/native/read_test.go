package native

import (
	"testing"

	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
)

// What is declared otherwise is another set: the kernel does not change a declaration.
func TestDeclarationsAreComparedInEachPart(t *testing.T) {
	comment := func(text string) []byte {
		return userdata.AppendString(nil, userdata.NFTNL_UDATA_SET_COMMENT, text)
	}
	base := nfnetlink.Set{
		Name: "s-a", Flags: unix.NFT_SET_MAP, KeyType: 7, KeyLen: 4, DataType: 7, DataLen: 4, UserData: comment("c"),
	}
	for name, tt := range map[string]struct {
		change func(*nfnetlink.Set)
		same   bool
	}{
		"nothing":     {func(*nfnetlink.Set) {}, true},
		"flags":       {func(s *nfnetlink.Set) { s.Flags |= unix.NFT_SET_CONSTANT }, false},
		"key type":    {func(s *nfnetlink.Set) { s.KeyType = 8 }, false},
		"key length":  {func(s *nfnetlink.Set) { s.KeyLen = 8 }, false},
		"data type":   {func(s *nfnetlink.Set) { s.DataType = 8 }, false},
		"data length": {func(s *nfnetlink.Set) { s.DataLen = 8 }, false},
		"size":        {func(s *nfnetlink.Set) { s.Size = 8 }, false},
		"comment":     {func(s *nfnetlink.Set) { s.UserData = comment("d") }, false},
		"notes":       {func(s *nfnetlink.Set) { s.UserData = append(s.UserData, 0, 1, 2) }, true},
		"handle":      {func(s *nfnetlink.Set) { s.Handle = 8 }, true},
		"count":       {func(s *nfnetlink.Set) { s.Count = 8 }, true},
		"more":        {func(s *nfnetlink.Set) { s.Special = []uint16{unix.NFTA_SET_TIMEOUT} }, false},
	} {
		other := base
		tt.change(&other)
		if sameDeclaration(base, other) != tt.same || sameDeclaration(other, base) != tt.same {
			t.Errorf("%s: the same is not %t", name, tt.same)
		}
	}
}

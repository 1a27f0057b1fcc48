// Package layouts lists the layouts.
package layouts

import (
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/xtables"
)

// Of returns the layout of a mode. The chain is used by layouts that have one.
func Of(m nft.Mode, chain string) nft.Layout {
	if m == nft.ModeIPTables {
		return xtables.Layout{Name: chain}
	}
	return native.Layout{}
}

package answer

import (
	"fmt"
	"strings"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// nowhere is the position of a problem that is not about a place in a file.
var nowhere config.Position

// placeText returns where an entry of a list comes from.
func placeText(place config.Position, entry string) string {
	for _, exemption := range nft.Exemptions() {
		if place == nowhere && entry == exemption.Prefix.String() {
			return "link-local, " + exemption.Key + " is false"
		}
	}
	return place.String()
}

// portRanges lists ports as --to-ports does.
func portRanges(list []config.PortRange) string { return strings.Join(cli.Texts(list), ",") }

// listed lists the first addresses, CIDRs or ranges, and counts the others.
func listed(words []string) string {
	const limit = 8
	text := strings.Join(words[:min(len(words), limit)], ", ")
	if len(words) > limit {
		text += fmt.Sprintf(" and %d more", len(words)-limit)
	}
	return text
}

// Plural returns a number of things.
func Plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// verb returns a verb after a number of things.
func verb(n int, word string) string { return choose(n == 1, word+"s", word) }

func choose(first bool, a, b string) string {
	if first {
		return a
	}
	return b
}

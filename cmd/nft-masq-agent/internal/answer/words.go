package answer

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

func familyName(ipv6 bool) string {
	return choose(ipv6, "IPv6", "IPv4")
}

// familyKey is the name in JSON.
func familyKey(ipv6 bool) string { return choose(ipv6, "ipv6", "ipv4") }

// placeText returns where an entry of a list comes from.
func placeText(place config.Position, entry string) string {
	for _, exemption := range nft.Exemptions() {
		if place == nowhere && entry == exemption.Prefix.String() {
			return "link-local, " + exemption.Key + " is false"
		}
	}
	return place.String()
}

func texts[T fmt.Stringer](list []T) []string {
	lines := make([]string, len(list))
	for i, v := range list {
		lines[i] = v.String()
	}
	return lines
}

// portRanges lists ports as --to-ports does.
func portRanges(list []config.PortRange) string { return strings.Join(texts(list), ",") }

// Plural returns a number of things.
func Plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// verb returns a verb after a number of things.
func verb(n int, word string) string { return choose(n == 1, word+"s", word) }

// addressList lists the first addresses or CIDRs and counts the others.
func addressList[T fmt.Stringer](list []T) string {
	const limit = 8
	text := strings.Join(texts(list[:min(len(list), limit)]), ", ")
	if len(list) > limit {
		text += fmt.Sprintf(" and %d more", len(list)-limit)
	}
	return text
}

func choose(first bool, a, b string) string {
	if first {
		return a
	}
	return b
}

// lines writes texts as one line each.
func lines(b *strings.Builder, indent string, list ...string) {
	for _, text := range list {
		b.WriteString(cli.Line(text, indent))
	}
}

// widest is the most columns of the first line of an answer, and shortest the fewest after
// which it is broken where a sentence or a part of one ends.
const widest, shortest = 100, 40

// write writes problems: of each the verdict, and below it what it goes on to say.
func write(b *strings.Builder, list config.Problems) {
	for _, p := range list {
		details := p.Details
		p.Details = ""
		first(b, p.Error())
		if details != "" {
			lines(b, "  ", strings.Split(details, "\n")...)
		}
	}
}

// first writes a text whose first line is not wide: the rest follows in another line.
func first(b *strings.Builder, text string) {
	text = strings.Join(strings.Fields(text), " ")
	if utf8.RuneCountInString(text) <= widest {
		b.WriteString(text + "\n")
		return
	}
	head := strings.ReplaceAll(string([]rune(text)[:widest]), " . ", " + ") // nft's fields, no end of a sentence
	for _, marks := range [][]string{{". ", "; ", ": "}, {", ", " ("}, {" "}} {
		end := 0
		for _, mark := range marks {
			end = max(end, strings.LastIndex(head, mark))
		}
		if end >= shortest {
			b.WriteString(text[:end] + "\n")
			lines(b, "  ", strings.TrimLeft(text[end:], ".;:, "))
			return
		}
	}
	b.WriteString(text + "\n")
}

// list writes texts below a title, and nothing if there are none.
func list(b *strings.Builder, title string, list []string) {
	if len(list) > 0 {
		b.WriteString("\n" + title + "\n")
		lines(b, "  ", list...)
	}
}

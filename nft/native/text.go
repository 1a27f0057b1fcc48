package native

import (
	"fmt"
	"strings"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// Text implements [nft.Layout]: input for `nft -f`, which replaces our table with
// exactly this.
func (Layout) Text(tables []nft.Table) string {
	var b strings.Builder
	for _, t := range tables {
		// The first line makes the second succeed if the table does not exist.
		fmt.Fprintf(&b, "table %s %s\ndelete table %[1]s %s\n", t.Family, t.Name)
		writeTable(&b, t)
	}
	return b.String()
}

func writeTable(b *strings.Builder, t nft.Table) {
	fmt.Fprintf(b, "table %s %s {\n", t.Family, t.Name)
	for _, c := range t.Counters {
		fmt.Fprintf(b, "\tcounter %s {\n\t\tpackets 0 bytes 0\n\t}\n\n", c)
	}
	for _, s := range t.Sets {
		writeSet(b, s)
	}
	for i, c := range t.Chains {
		if i > 0 {
			b.WriteString("\n")
		}
		fmt.Fprintf(b, "\tchain %s {\n", c.Name)
		if c.Hook != nil {
			fmt.Fprintf(b, "\t\ttype %s hook postrouting priority %s; policy accept;\n", c.Hook.Type,
				priorityText(c.Hook.Priority))
		}
		for _, r := range c.Rules {
			fmt.Fprintf(b, "\t\t%s\n", r)
		}
		b.WriteString("\t}\n")
	}
	b.WriteString("}\n")
}

// priorityText returns a priority as nft prints it: by name if it is at most 10 away, as only that
// of the base chain.
func priorityText(p int32) string {
	if p == chainPriority {
		return fmt.Sprintf("srcnat + %d", p-nft.SrcNAT)
	}
	return fmt.Sprint(p)
}

func writeSet(b *strings.Builder, s nft.Set) {
	perLine := 2
	switch {
	case s.Learned:
		fmt.Fprintf(b, "\tset %s%s {\n\t\ttype %s . %[3]s\n\t\tsize %d\n\t\tflags dynamic,timeout\n\t\tcomment %q\n\t}\n\n",
			s.Name, nft.SideA, typeName(s), nft.LearnedSize, s.Comment)
		return
	case s.Mappings != nil:
		value := typeName(s)
		if s.Verdicts {
			value = "verdict"
		}
		fmt.Fprintf(b, "\tmap %s%s {\n\t\ttype %s : %s\n", s.Name, nft.SideA, typeName(s), value)
		if s.IPv6 {
			perLine = 1
		}
	default:
		fmt.Fprintf(b, "\tset %s%s {\n\t\ttype %s\n\t\tflags interval\n", s.Name, nft.SideA, typeName(s))
	}
	fmt.Fprintf(b, "\t\tcomment %q\n\t\telements = { ", s.Comment)
	for i, text := range elementsOf(s) {
		switch {
		case i == 0:
		case i%perLine == 0:
			b.WriteString(",\n\t\t\t     ")
		default:
			b.WriteString(", ")
		}
		b.WriteString(text)
	}
	b.WriteString(" }\n\t}\n\n")
}

func typeName(s nft.Set) string {
	if s.IPv6 {
		return "ipv6_addr"
	}
	return "ipv4_addr"
}

// elementsOf returns the elements of a set or a map as nft prints them.
func elementsOf(s nft.Set) (texts []string) {
	for _, p := range s.Prefixes {
		texts = append(texts, config.CIDR{Prefix: p}.Text())
	}
	for _, m := range s.Mappings {
		texts = append(texts, m.String())
	}
	return texts
}

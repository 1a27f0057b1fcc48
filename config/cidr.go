package config

import (
	"fmt"
	"net/netip"
	"regexp"
	"strings"
)

// parseAddress parses an address, or a CIDR for all those within. The message is as
// that of [parseCIDR].
func parseAddress(s string) (netip.Prefix, string) {
	p, msg := parseCIDR(s)
	text, _, network := strings.Cut(s, "/")
	a, err := netip.ParseAddr(text)
	switch {
	case msg == fmt.Sprintf(notCIDR, quote(s)):
		msg = fmt.Sprintf("%s is neither an address nor a CIDR: write one such as %q", quote(s), "198.51.100.11")
	case strings.Contains(msg, "host bits"):
		msg = fmt.Sprintf("%q has host bits set: write %q for the address, or %q for all addresses of the node in it",
			s, a, p.Masked())
	case err == nil && !network && a.Zone() == "" && !a.Is4In6():
		return netip.PrefixFrom(a, a.BitLen()), ""
	}
	return p, msg
}

const notCIDR = `%s is not a CIDR: write one such as "10.0.0.0/8"`

// slips replaces what nobody means in a CIDR.
var slips = strings.NewReplacer(" ", "", "\t", "", "\n", "", `\/`, "/", `\`, "/")

var (
	leadingZero = regexp.MustCompile(`/0[0-9]+$`)
	zones       = regexp.MustCompile(`%[^/]*`)
	template    = regexp.MustCompile(`[${<][{A-Za-z_]`) // ${POD_CIDR}, $POD_CIDR, {{ .podCIDR }}, <pod-cidr>
)

// notOne says why a text with a comma, a hyphen or the beginning of a template is no CIDR.
func notOne(s string) string {
	if template.MatchString(s) {
		return quote(s) + " is a placeholder that nothing has replaced: render the file before it is mounted"
	}
	if strings.Contains(s, " - ") {
		return quote(s) + ` is more than one entry, because a line is indented further: align the "-"`
	}
	for entry := range strings.SplitSeq(s, ",") {
		if _, err := netip.ParsePrefix(strings.TrimSpace(entry)); err != nil {
			return fmt.Sprintf(notCIDR, quote(s))
		}
	}
	return quote(s) + " is more than one CIDR: write each as an entry of its own"
}

// parseCIDR parses a CIDR. The message explains what is wrong and what to write
// instead; it is empty if the CIDR is valid.
func parseCIDR(s string) (netip.Prefix, string) {
	if len(s) > maxQuoted {
		return netip.Prefix{}, fmt.Sprintf(notCIDR, quote(s))
	}
	p, err := netip.ParsePrefix(s)
	if err == nil && !p.Addr().Is4In6() && p == p.Masked() {
		return p, ""
	}
	addr, _, slash := strings.Cut(s, "/")
	a, addrErr := netip.ParseAddr(addr)
	zone := zones.FindString(s)
	meant := slips.Replace(s)
	switch {
	case strings.ContainsAny(s, ",${<"), strings.Contains(s, " - "):
		return p, notOne(s)
	case meant != s:
		slip := "blank"
		if strings.Contains(s, `\`) {
			slip = "backslash"
		}
		if _, msg := parseCIDR(meant); msg == "" {
			return p, fmt.Sprintf("%s has a %s in it: write %q", quote(s), slip, meant)
		}
		return p, fmt.Sprintf(notCIDR, quote(s))
	case leadingZero.MatchString(s):
		return p, quote(s) + " has a prefix length with a leading zero, which the older agents' iptables reads as octal: " +
			"write it without the zero, in decimal"
	case zone != "":
		return p, fmt.Sprintf("%s has a zone, which is not possible here: remove %q", quote(s), zone)
	case addrErr != nil:
		return p, fmt.Sprintf(notCIDR, quote(s))
	case a.Is4In6() && slash && p.Bits() < 96:
		return p, fmt.Sprintf("%q is IPv4-mapped: write the IPv4 network", s)
	case a.Is4In6():
		bits := 32
		if slash {
			bits = p.Bits() - 96
		}
		return p, fmt.Sprintf("%q is IPv4-mapped: write %q", s, netip.PrefixFrom(a.Unmap(), bits).Masked())
	case !slash:
		return p, fmt.Sprintf("%q is an address, not a CIDR: write %q", s, netip.PrefixFrom(a, a.BitLen()))
	case err == nil:
		return p, fmt.Sprintf("%q has host bits set: write %q", s, p.Masked())
	}
	return p, fmt.Sprintf("%s has an invalid prefix length: must be from 0 to %d", quote(s), a.BitLen())
}

package config

import (
	"fmt"
	"net/netip"
	"regexp"
	"strings"
)

// parseAddress parses an address, or a CIDR that stands for all addresses in it. The message is as that of [parseCIDR].
func parseAddress(s string) (netip.Prefix, string) {
	if len(s) > maxQuoted { // there may be many aliases of a long text
		return parsePrefix(s, notAddress)
	}
	a, err := netip.ParseAddr(s)
	if err == nil && a.Zone() == "" && !a.Is4In6() {
		return netip.PrefixFrom(a, a.BitLen()), ""
	}
	p, msg := parsePrefix(s, notAddress)
	if p != p.Masked() && !p.Addr().Is4In6() {
		msg = fmt.Sprintf("%q has host bits set: write %q for the address, or %q for all addresses of the node in it",
			s, p.Addr(), p.Masked())
	}
	return p, msg
}

const (
	notCIDR    = `%s is not a CIDR: write one such as "10.0.0.0/8"`
	notAddress = `%s is neither an address nor a CIDR: write one such as "198.51.100.11"`
)

// placeholder matches ${POD_CIDR}, $(POD_CIDR), $POD_CIDR, {{ .podCIDR }} and <pod-cidr>.
var placeholder = regexp.MustCompile(`[${<][({A-Za-z_]`)

// abbreviated matches 10/8 and 10.244/16, which tcpdump and iptables accept.
var abbreviated = regexp.MustCompile(`^[0-9]+(\.[0-9]+){0,2}/[0-9]+$`)

// complete returns the CIDR for which an abbreviated one stands.
func complete(s string) (netip.Prefix, error) {
	address, length, _ := strings.Cut(s, "/")
	missing := 3 - strings.Count(address, ".")
	p, err := netip.ParsePrefix(address + strings.Repeat(".0", missing) + "/" + length)
	return p.Masked(), err
}

// severalCIDRs reports whether a text lists CIDRs, with anything between them by which people separate them.
func severalCIDRs(s string) bool {
	end := max(strings.IndexAny(s, " ;|"), 0)
	_, err := netip.ParsePrefix(s[:end])
	return strings.Contains(s, ",") || err == nil && strings.Contains(s[end:], "/")
}

// parseCIDR parses a CIDR. The message explains what is wrong and what to write instead; it is empty if the CIDR is
// valid.
func parseCIDR(s string) (netip.Prefix, string) { return parsePrefix(s, notCIDR) }

// parsePrefix is like parseCIDR. invalid is the format of the message about a text that looks like nothing known.
func parsePrefix(s, invalid string) (netip.Prefix, string) {
	if len(s) > maxQuoted { // the errors of netip have a copy of it, and there may be many aliases of a long text
		return netip.Prefix{}, fmt.Sprintf(invalid, quote(s))
	}
	p, err := netip.ParsePrefix(s)
	if err == nil && !p.Addr().Is4In6() && p == p.Masked() {
		return p, ""
	}
	address, length, network := strings.Cut(s, "/")
	a, addressErr := netip.ParseAddr(address)
	switch {
	case quotable(s) && placeholder.MatchString(s):
		return p, quote(s) + " is a placeholder that nothing has replaced: render the file before it is mounted"
	case quotable(s) && severalCIDRs(s):
		return p, quote(s) + " is more than one CIDR: write each as an entry of its own"
	case abbreviated.MatchString(s):
		full, err := complete(s)
		if err != nil {
			return p, fmt.Sprintf(invalid, quote(s))
		}
		return p, fmt.Sprintf("%q is abbreviated: write %q", s, full)
	case !quotable(s), addressErr != nil, a.Zone() != "", strings.Trim(length, "0123456789") != "":
		return p, fmt.Sprintf(invalid, quote(s))
	case a.Is4In6():
		return p, fmt.Sprintf("%q is IPv4-mapped: write it as IPv4", s)
	case !network:
		return p, fmt.Sprintf("%q is an address, not a CIDR: write %q", s, netip.PrefixFrom(a, a.BitLen()))
	case err != nil: // iptables reads a leading zero as octal
		return p, fmt.Sprintf("%q has an invalid prefix length: want 0 to %d, without a leading zero", s, a.BitLen())
	}
	return p, fmt.Sprintf("%q has host bits set: write %q", s, p.Masked())
}

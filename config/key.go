package config

import (
	"slices"
	"strings"
)

// Keys of the policy's conditions.
const (
	KeyNonMasqueradeCIDRs    = "nonMasqueradeCIDRs"
	KeyForceMasqueradeCIDRs  = "forceMasqueradeCIDRs"
	KeyNonMasqueradeSrcCIDRs = "nonMasqueradeSrcCIDRs"
	KeyMasqueradeSrcCIDRs    = "masqueradeSrcCIDRs"

	KeyMasqueradeSrcInterfaces = "masqueradeSrcInterfaces"
)

// Keys that control source address translation.
const (
	KeyEnforceNonMasquerade = "enforceNonMasquerade"
	KeySNATAddresses        = "snatAddresses"
)

// Other keys of a file.
const (
	keyMasqLinkLocal     = "masqLinkLocal"
	keyMasqLinkLocalIPv6 = "masqLinkLocalIPv6"
	keyEnableIPv6        = "enableIPv6"
	keyLinkLocal         = "linkLocal"
	keyResyncInterval    = "resyncInterval"
	keyCIDRLimit         = "cidrLimit"
	keyStaleConnections  = "staleConnections"
)

// rows returns the rows of all keys of a file.
func rows() []Row {
	return slices.Concat(Conditions(), Translations(), []Row{
		{Key: keyMasqLinkLocal, older: true, field: func(c *Config) any { return &c.MasqLinkLocal }},
		{Key: keyMasqLinkLocalIPv6, older: true, field: func(c *Config) any { return &c.MasqLinkLocalIPv6 }},
		{Key: keyEnableIPv6, field: func(c *Config) any { return &c.EnableIPv6 }},
		{Key: keyLinkLocal, field: func(*Config) any { return nil }},
		{Key: keyResyncInterval, older: true, field: func(c *Config) any { return &c.ResyncInterval }},
		{Key: keyCIDRLimit, older: true, field: func(c *Config) any { return &c.cidrLimit }},
		{Key: keyStaleConnections, field: func(c *Config) any { return &c.StaleConnections }},
	})
}

// Keys returns the keys of a file. They are case-insensitive.
func Keys() []string {
	var keys []string
	for _, row := range rows() {
		keys = append(keys, row.Key)
	}
	return keys
}

// knownKey returns the key that a name denotes, ignoring case, or "".
func knownKey(keys []string, name string) string {
	for _, k := range keys {
		if strings.EqualFold(k, name) {
			return k
		}
	}
	return ""
}

// likelyKey returns which of the keys a name denotes or probably misspells, or "":
// one that differs only in separators and common abbreviations, or in at most two
// wrong, missing, swapped or extra letters (one in a short name). A different digit
// or a leading "no" is not a misspelling: a user who writes IPv4 means it.
func likelyKey(keys []string, name string) string {
	if len(name) > 2*len(KeyNonMasqueradeSrcCIDRs) {
		return ""
	}
	name = strings.ToLower(name)
	shortName := short(name)
	best, likely := 3, ""
	for _, key := range keys {
		k := strings.ToLower(key)
		switch {
		case name == "no"+k, strings.Contains(name, "4"), strings.Contains(name, "6") != strings.Contains(k, "6"):
			continue
		}
		shortKey := short(k)
		for edits := range best {
			if edits > 1 && len(k) < 10 {
				break
			}
			if Within(edits, name, k) || Within(edits, shortName, shortKey) {
				best, likely = edits, key
			}
		}
	}
	return likely
}

// short returns a lower-case name without separators and with words abbreviated.
func short(name string) string {
	return abbreviations.Replace(separators.Replace(name))
}

var (
	separators    = strings.NewReplacer("-", "", "_", "", ".", "", " ", "")
	abbreviations = strings.NewReplacer("masquerade", "masq", "source", "src")
)

// Within reports whether at most that many edits turn a into b. An edit deletes,
// inserts or replaces one character, or swaps two adjacent ones.
func Within(edits int, a, b string) bool {
	for a != "" && b != "" && a[0] == b[0] {
		a, b = a[1:], b[1:]
	}
	if a == "" || b == "" || edits == 0 {
		return len(a)+len(b) <= edits
	}
	if len(a) > len(b)+edits || len(b) > len(a)+edits {
		return false
	}
	return Within(edits-1, a[1:], b) || Within(edits-1, a, b[1:]) || Within(edits-1, a[1:], b[1:]) ||
		len(a) > 1 && len(b) > 1 && a[0] == b[1] && a[1] == b[0] && Within(edits-1, a[2:], b[2:])
}

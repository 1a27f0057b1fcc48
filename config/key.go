package config

import "strings"

// Keys of the policy's conditions.
const (
	KeyNonMasqueradeCIDRs    = "nonMasqueradeCIDRs"
	KeyForceMasqueradeCIDRs  = "forceMasqueradeCIDRs"
	KeyNonMasqueradeSrcCIDRs = "nonMasqueradeSrcCIDRs"
	KeyMasqueradeSrcCIDRs    = "masqueradeSrcCIDRs"

	KeyMasqueradeSrcInterfaces = "masqueradeSrcInterfaces"
	keyMasqueradeOutInterfaces = "masqueradeOutInterfaces"
)

// Keys that control source address translation.
const (
	KeyEnforceNonMasquerade = "enforceNonMasquerade"
	KeySNATAddresses        = "snatAddresses"
	KeySNATRules            = "snatRules"
	KeyDropInvalid          = "dropInvalid"
	KeyToPorts              = "toPorts"
	KeyPortsPerPod          = "portsPerPod"
	keyRandomFully          = "randomFully"
)

// Other keys of a file.
const (
	KeyMasqLinkLocal     = "masqLinkLocal"
	KeyMasqLinkLocalIPv6 = "masqLinkLocalIPv6"
	KeyEnableIPv6        = "enableIPv6"
	keyLinkLocal         = "linkLocal"
	keyResyncInterval    = "resyncInterval"
	keyCIDRLimit         = "cidrLimit"
	keyStaleConnections  = "staleConnections"
)

// Keys returns the keys of a file. They are case-insensitive.
func Keys() []string {
	var keys []string
	for _, row := range table {
		keys = append(keys, row.Key)
	}
	return keys
}

// knownKey returns the row of the key that a name denotes, ignoring case, or nil.
func knownKey(name string) *Row {
	for i := range table {
		if strings.EqualFold(table[i].Key, name) {
			return &table[i]
		}
	}
	return nil
}

// forkKeys are keys of other programs that read the same file, in lower case, and the keys that do the same here.
var forkKeys = map[string]string{
	"masqueradecidrs":          KeyForceMasqueradeCIDRs,
	"masqueradeexceptioncidrs": KeyForceMasqueradeCIDRs,
	"outputinterface":          keyMasqueradeOutInterfaces,
	"outputaddress":            KeySNATAddresses,
	"outputaddressipv6":        KeySNATAddresses,
}

// likelyKey returns the key that a name denotes or probably misspells, or "": one
// that does the same in a fork, one that differs only in separators and common
// abbreviations, or in at most two wrong, missing, swapped or extra letters (one in
// a short name). A different digit or a leading "no" is not a misspelling: a user
// who writes IPv4 means it.
func likelyKey(name string) string {
	if len(name) > 2*len(KeyNonMasqueradeSrcCIDRs) {
		return ""
	}
	name = strings.ToLower(name)
	if key := forkKeys[name]; key != "" {
		return key
	}
	shortName := abbreviations.Replace(name)
	for edits := range 3 {
		for i, key := range lowerKeys {
			intended := name == "no"+key || strings.Contains(name, "4") ||
				strings.Contains(name, "6") != strings.Contains(key, "6")
			if intended || edits == 2 && len(key) < 10 {
				continue
			}
			if similar(edits, name, key) || similar(edits, shortName, shortKeys[i]) {
				return table[i].Key
			}
		}
	}
	return ""
}

// The keys of the table in lower case, and short.
var lowerKeys, shortKeys = func() (lower, shorter []string) {
	for _, key := range Keys() {
		lower = append(lower, strings.ToLower(key))
		shorter = append(shorter, abbreviations.Replace(strings.ToLower(key)))
	}
	return lower, shorter
}()

// abbreviations removes separators from a lower-case name, and abbreviates words.
var abbreviations = strings.NewReplacer("-", "", "_", "", ".", "", " ", "", "masquerade", "masq", "source", "src")

// similar reports whether at most that many edits turn a into b. An edit deletes,
// inserts or replaces one character, or swaps two adjacent ones.
func similar(edits int, a, b string) bool {
	for a != "" && b != "" && a[0] == b[0] {
		a = a[1:]
		b = b[1:]
	}
	if a == "" || b == "" || edits == 0 {
		return len(a)+len(b) <= edits
	}
	swapped := len(a) > 1 && len(b) > 1 && a[:2] == string([]byte{b[1], b[0]})
	return similar(edits-1, a[1:], b) || similar(edits-1, a, b[1:]) || similar(edits-1, a[1:], b[1:]) ||
		swapped && similar(edits-1, a[2:], b[2:])
}

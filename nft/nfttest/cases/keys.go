package cases

import (
	"strings"
	"testing"

	"nft-masq-agent/config"
)

// A Key is a key of a file with two values that mean different things. Tests ask everybody who
// knows what a policy means about each of them: the hash, explanations, check and diff, the
// judge of tracked connections, and real packets.
type Key struct {
	Name   string
	Values [2]string
	// NoPolicy means that the key is about no connection: the hash and the rules are the same.
	NoPolicy bool
}

// The values of keys with lists of networks.
const (
	someNetworks  = "[203.0.113.0/24, '2001:db8:1::/48']"
	otherNetworks = "[198.51.100.0/24, '2001:db8:2::/48']"
)

func keys() []Key {
	return []Key{
		{Name: config.KeyNonMasqueradeCIDRs, Values: [2]string{someNetworks, otherNetworks}},
		{Name: config.KeyForceMasqueradeCIDRs, Values: [2]string{"[10.9.0.0/16, 'fd00:9::/32']", "[10.8.0.0/16]"}},
		{Name: config.KeyNonMasqueradeSrcCIDRs, Values: [2]string{"[10.244.1.2/32]", "[10.244.1.0/30]"}},
		{Name: config.KeyMasqueradeSrcCIDRs, Values: [2]string{"[10.244.0.0/16]", "[10.244.9.0/24, 10.244.1.9/32]"}},
		{Name: "masqueradeHost", Values: [2]string{"true", "false"}},
		{Name: config.KeyMasqueradeSrcInterfaces, Values: [2]string{"[pod0]", "[cni0]"}},
		{Name: "nonMasqueradeOutInterfaces", Values: [2]string{"[eth0]", "[wg0]"}},
		{Name: "masqueradeOutInterfaces", Values: [2]string{"[eth0]", "[wg0]"}},
		{Name: config.KeyEnforceNonMasquerade, Values: [2]string{"true", "false"}},
		{Name: config.KeySNATAddresses, Values: [2]string{"[198.51.100.11]", "[198.51.100.12]"}},
		{Name: config.KeySNATRules, Values: [2]string{
			"[{to: [203.0.113.0/24], addresses: [198.51.100.11]}]", "[{to: [203.0.113.0/24], addresses: [198.51.100.12]}]",
		}},
		{Name: config.KeyDropInvalid, Values: [2]string{"true", "false"}},
		{Name: config.KeyPortsPerPod, Values: [2]string{"1024", "2000"}},
		{Name: config.KeyToPorts, Values: [2]string{"20000-29999", "30000-39999"}},
		{Name: "randomFully", Values: [2]string{"true", "false"}},
		{Name: "masqLinkLocal", Values: [2]string{"true", "false"}},
		{Name: "masqLinkLocalIPv6", Values: [2]string{"true", "false"}},
		{Name: "linkLocal", Values: [2]string{"true", "null"}, NoPolicy: true},
		{Name: "enableIPv6", Values: [2]string{"true", "false"}},
		{Name: "resyncInterval", Values: [2]string{"30s", "40s"}, NoPolicy: true},
		{Name: "cidrLimit", Values: [2]string{"50", "60"}, NoPolicy: true},
		{Name: "staleConnections", Values: [2]string{"udp", "all"}, NoPolicy: true},
	}
}

// EachKey runs a test for each key of a file. A key without values here fails it.
func EachKey(t *testing.T, test func(*testing.T, Key)) {
	t.Helper()
	known := map[string]Key{}
	for _, k := range keys() {
		known[k.Name] = k
	}
	for _, name := range config.Keys() {
		t.Run(name, func(t *testing.T) {
			k, ok := known[name]
			if !ok {
				t.Fatalf("keys in nft/nfttest/cases/keys.go has no two values of %s", name)
			}
			test(t, k)
		})
	}
}

// Files returns two files that differ in the value of the key. Both say which sources are pods.
func (k Key) Files() (texts [2]string) {
	for i, value := range k.Values {
		for _, line := range []string{
			config.KeyMasqueradeSrcCIDRs + ": [10.244.0.0/16, 'fd00:10:244::/48']\n", "enableIPv6: true\n",
			config.KeyNonMasqueradeCIDRs + ": [10.0.0.0/8, 'fd00::/8']\n",
		} {
			if !strings.HasPrefix(line, k.Name+":") {
				texts[i] += line
			}
		}
		texts[i] += k.Name + ": " + value + "\n"
	}
	return texts
}

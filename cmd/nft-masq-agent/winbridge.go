package main

import (
	"encoding/json"
	"errors"
	"fmt"

	"nft-masq-agent/config"
)

// The APIs of win-bridge by the apiVersion of its configuration.
const (
	windowsHNS = 1
	windowsHCN = 2
)

func parseWindowsAPI(s string) (int, error) {
	switch s {
	case "1":
		return windowsHNS, nil
	case "2":
		return windowsHCN, nil
	}
	return 0, errors.New("is neither 1 (HNS) nor 2 (HCN)")
}

// The plugin takes policies of this name only, and keys with exactly these
// capitals (containernetworking/plugins, win-bridge; microsoft/hcsshim).
type windowsPolicy struct {
	Name  string `json:"name"`
	Value any    `json:"value"`
}

type outboundNATHNS struct {
	Type          string   `json:"Type"`
	ExceptionList []string `json:"ExceptionList"`
}

type outboundNATHCN struct {
	Type     string             `json:"Type"`
	Settings outboundExceptions `json:"Settings"`
}

type outboundExceptions struct {
	Exceptions []string `json:"Exceptions"`
}

// winBridge gives the policy that exempts on a Windows node what the config
// exempts on this one, in the order of the file. It is an IPv4 policy: the
// documentation of the plugin has no IPv6 one.
func (f *renderFlags) winBridge(e environment, l loaded) (string, error) {
	if err := sayableOnWindows(l.config); err != nil {
		return "", err
	}
	exceptions := []string{}
	for _, family := range l.ruleset.Policy.Families {
		for _, c := range family.NonMasq.CIDRs {
			if !family.IPv6 {
				exceptions = append(exceptions, c.String())
			}
		}
	}
	if n := countIPv6(l.config.NonMasqueradeCIDRs); n > 0 {
		_, _ = fmt.Fprintf(e.stderr, "left out: %s, as the policy is one for IPv4\n", counted(n, "IPv6 CIDR"))
	}
	b, err := json.Marshal(windowsNAT(f.windowsAPI, exceptions))
	return string(b) + "\n", err
}

func windowsNAT(api int, exceptions []string) windowsPolicy {
	const kind = "OutBoundNAT"
	p := windowsPolicy{Name: "EndpointPolicy", Value: outboundNATHNS{kind, exceptions}}
	if api == windowsHCN {
		p.Value = outboundNATHCN{kind, outboundExceptions{exceptions}}
	}
	return p
}

// sayableOnWindows says what of a config a list of exceptions cannot say.
func sayableOnWindows(c config.Config) error {
	var problems config.Problems
	for _, l := range []struct {
		key   string
		cidrs []config.CIDR
	}{
		{"forceMasqueradeCIDRs", c.ForceMasqueradeCIDRs},
		{"nonMasqueradeSrcCIDRs", c.NonMasqueradeSrcCIDRs},
		{"masqueradeSrcCIDRs", c.MasqueradeSrcCIDRs},
	} {
		for _, cidr := range l.cidrs {
			problems = append(problems, config.Problem{Pos: cidr.Pos, Msg: fmt.Sprintf(
				"%s: %s cannot be said in a policy of win-bridge, which has exempted destinations only", l.key, cidr.Prefix)})
		}
	}
	if len(problems) > 0 {
		return problems
	}
	return nil
}

func countIPv6(cidrs []config.CIDR) int {
	n := 0
	for _, c := range cidrs {
		if c.Addr().Is6() {
			n++
		}
	}
	return n
}

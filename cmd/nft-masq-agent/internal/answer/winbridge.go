package answer

import (
	"encoding/json"
	"fmt"
	"slices"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// The APIs of win-bridge by the apiVersion of its configuration.
const (
	WindowsHNS = 1
	WindowsHCN = 2
)

// The plugin accepts only policies with this name, and keys with exactly this
// capitalization (containernetworking/plugins, win-bridge; microsoft/hcsshim).
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

// WinBridge returns the policy that exempts on a Windows node what the config
// exempts on this one, in file order, for an API of the plugin. It is an IPv4
// policy, because the documentation of the plugin has no IPv6 one; leftOut counts
// omitted IPv6 CIDRs. What the policy cannot express is an error of type
// [config.Problems].
func WinBridge(api int, c config.Config, p nft.Policy) (text string, leftOut int, err error) {
	if err := checkWindows(c); err != nil {
		return "", 0, err
	}
	exceptions := []string{}
	for _, family := range p.Families {
		for _, c := range family.List(config.KeyNonMasqueradeCIDRs).CIDRs {
			if !family.IPv6 {
				exceptions = append(exceptions, c.String())
			}
		}
	}
	b, err := json.Marshal(windowsNAT(api, exceptions))
	return string(b) + "\n", countIPv6(c.NonMasqueradeCIDRs), err
}

func windowsNAT(api int, exceptions []string) windowsPolicy {
	const kind = "OutBoundNAT"
	p := windowsPolicy{Name: "EndpointPolicy", Value: outboundNATHNS{kind, exceptions}}
	if api == WindowsHCN {
		p.Value = outboundNATHCN{kind, outboundExceptions{exceptions}}
	}
	return p
}

// checkWindows returns an error for what a list of exceptions cannot express.
func checkWindows(c config.Config) error {
	var problems config.Problems
	for _, row := range slices.Backward(config.Conditions()) {
		if row.WinBridge {
			continue
		}
		for _, given := range row.Values(c) {
			problems = append(problems, config.Problem{Pos: given.Pos, Msg: fmt.Sprintf(
				"%s: %s is not supported by win-bridge, which can only exempt destinations", row.Key, given.Text)})
		}
	}
	for _, t := range config.Translations() {
		for _, given := range t.Values(c) {
			problems = append(problems, config.Problem{Pos: given.Pos, Msg: fmt.Sprintf(
				"%s: %s is not supported by win-bridge, which can only exempt destinations", t.Key, given.Text)})
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

package answer

import (
	"encoding/json"
	"errors"
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

// An outboundNAT is the value of a policy for an API: HNS has a list of exceptions,
// HCN has settings. The plugin accepts only policies with the name EndpointPolicy, and
// keys with exactly this capitalization (containernetworking/plugins, win-bridge;
// microsoft/hcsshim).
type outboundNAT struct {
	Type          string
	ExceptionList []string    `json:",omitzero"`
	Settings      hcnSettings `json:",omitzero"`
}

type hcnSettings struct{ Exceptions []string }

// WinBridge returns the policy that exempts on a Windows node what the config
// exempts on this one, in file order, for an API of the plugin. It is an IPv4
// policy, because the documentation of the plugin has no IPv6 one; leftOut counts
// omitted IPv6 CIDRs. What the policy cannot express is an error of type
// [config.Problems].
func WinBridge(api int, c config.Config, p nft.Policy) (text string, leftOut int, err error) {
	if err := checkWindows(c); err != nil {
		return "", 0, err
	}
	if c.ToPorts != nil && len(*c.ToPorts) > 0 {
		return "", 0, errors.New(config.KeyToPorts + " is not supported by win-bridge")
	}
	ipv4, _ := p.Family(false)
	exceptions := texts(ipv4.List(config.KeyNonMasqueradeCIDRs).CIDRs)
	nat := outboundNAT{Type: "OutBoundNAT", ExceptionList: exceptions}
	if api == WindowsHCN {
		nat.ExceptionList, nat.Settings = nil, hcnSettings{exceptions}
	}
	b, err := json.Marshal(struct {
		Name  string      `json:"name"`
		Value outboundNAT `json:"value"`
	}{"EndpointPolicy", nat})
	return string(b) + "\n", countIPv6(c.NonMasqueradeCIDRs), err
}

// checkWindows returns an error for what a list of exceptions cannot express.
func checkWindows(c config.Config) error {
	var problems config.Problems
	unsupported := func(key string, values []config.Value) {
		for _, given := range values {
			problems = append(problems, config.Problem{Pos: given.Pos, Msg: fmt.Sprintf(
				"%s: %s is not supported by win-bridge, which can only exempt destinations", key, given.Text)})
		}
	}
	for _, row := range slices.Backward(config.Conditions()) {
		if !row.WinBridge {
			unsupported(row.Key, row.Values(c))
		}
	}
	for _, t := range config.Translations() {
		unsupported(t.Key, t.Values(c))
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

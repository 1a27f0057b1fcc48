package answer

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// endpointPolicy is an entry of policies in a configuration of win-bridge with apiVersion 2. The plugin accepts only
// policies with this name, and keys with exactly this capitalization (containernetworking/plugins, win-bridge;
// microsoft/hcsshim).
const endpointPolicy = `{"name":"EndpointPolicy","value":{"Type":"OutBoundNAT","Settings":{"Exceptions":%s}}}` + "\n"

// WinBridge returns the policy that exempts on a Windows node what the config
// exempts on this one, in file order. It is an IPv4 policy, because the documentation of
// the plugin has no IPv6 one; omitted counts the IPv6 CIDRs. Keys that the policy cannot
// express are an error of type [config.Problems]; a flag is a plain one.
func WinBridge(c config.Config, p nft.Policy) (text string, omitted int, err error) {
	if err := checkWindows(c); err != nil {
		return "", 0, err
	}
	if len(p.Ports) > 0 {
		return "", 0, errors.New(config.KeyToPorts + " is not supported by win-bridge")
	}
	ipv4, _ := p.Family(false)
	exceptions := cli.Texts(ipv4.List(config.KeyNonMasqueradeCIDRs).CIDRs)
	list, err := json.Marshal(exceptions)
	for _, cidr := range c.NonMasqueradeCIDRs {
		if cidr.Addr().Is6() {
			omitted++
		}
	}
	return fmt.Sprintf(endpointPolicy, list), omitted, err
}

// checkWindows returns an error for each key that a list of exceptions cannot express.
func checkWindows(c config.Config) error {
	var problems config.Problems
	for _, row := range slices.Concat(config.Conditions(), config.Translations()) {
		if position := c.Given(row.Key); position != (config.Position{}) && !row.WinBridge {
			problems = append(problems, config.Problem{
				Pos: position, Msg: row.Key + " is not supported by win-bridge, which can only exempt destinations",
			})
		}
	}
	return problems.Err()
}

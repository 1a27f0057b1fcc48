package modes

import "nft-masq-agent/nft/nfnetlink"

// Rules lists the rules of a chain, or of all chains of a table if it is "".
func Rules(c *nfnetlink.Conn, family nfnetlink.Family, table, chain string) ([]nfnetlink.Rule, error) {
	rules := []nfnetlink.Rule{}
	err := c.EachRule(family, table, chain, func(r nfnetlink.Rule) error {
		rules = append(rules, r)
		return nil
	})
	return rules, err
}

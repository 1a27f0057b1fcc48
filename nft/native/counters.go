package native

import (
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// Counters reads the counters of our table: the number of connections by verdict; none if there is no table.
func Counters(c *nfnetlink.Conn) (counts []nft.Counts, err error) {
	objects, err := c.Objects(nfnetlink.Inet, nft.TableName)
	if nfnetlink.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for _, o := range objects {
		for _, f := range []nft.FamilyPolicy{{}, {IPv6: true}} {
			for _, v := range []nft.Verdict{nft.Local, nft.Exempt, nft.Masqueraded, nft.Invalid} {
				if o.Name == string(v)+f.Suffix() {
					counts = append(counts, nft.Counts{IPv6: f.IPv6, Verdict: v, Packets: o.Packets})
				}
			}
		}
	}
	return counts, nil
}

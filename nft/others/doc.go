// Package others lists rules of other programs in nf_tables that an operator would search for: those that compare
// an address with the source or the destination, and the chains that translate sources. It does not say what
// such a rule means for a packet; package nftrace asks the kernel that.
//
// All rules are read once, one after another, and at most a few of them are kept. Each set that is compared with an
// address is read once, up to 200,000 elements in all. Intervals count in sets, not in rules. Rules of legacy ip_tables
// are not seen, nor ipsets, nor what an address is compared with by an xt match; iptables-nft has -s and -d as
// comparisons.
package others

// Package nftrace traces the first packet of a new connection through the rules of this node, and says
// which rule decided about it. The kernel traces; no rule is interpreted.
//
// For the time of a trace there is the table inet nft-masq-agent-trace. Before connection tracking
// it sets meta nftrace for packets that match, at most a few in a second; after it, the mark is taken
// from packets of known connections, which NAT chains do not see, and given to the first ones of new
// connections. A packet that is sent again because no answer came is one of a known connection.
// Two chains without rules at the end of postrouting and input show that the packet got there, and
// with which source. The next trace, the agent's next full check and cleanup delete what a killed trace left.
//
// A trace shows chains of nf_tables from priority -399 of prerouting and output to egress, those of iptables-nft
// with their xt matches among them. It does not show ingress chains, legacy ip_tables, tc, XDP or eBPF.
// CAP_NET_ADMIN is enough. Another program's transactions do not take longer while a trace runs.
package nftrace

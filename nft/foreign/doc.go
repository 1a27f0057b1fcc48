// Package foreign finds rules of other programs that masquerade on this node:
// chains that iptables-based agents left behind, and rules that masquerade what
// the configuration exempts.
//
// [Read] takes a snapshot of all rules that a packet can reach from the base
// chains of type nat at the postrouting hook. It reads no other chains, however
// many there are. [Legacy] and [Conflicts] are pure functions of the snapshot.
//
// The priority of a chain does not matter: if our chain returns, later chains
// still decide, and an earlier chain that masquerades has already translated the
// connection.
//
// The snapshot does not contain rules in legacy ip_tables (see [LegacyRules]),
// tables of families other than ip, ip6 and inet, and NAT outside netfilter. The
// targets of verdict maps are not read: each chain of the table that no rule
// jumps to counts as reachable through the map.
package foreign

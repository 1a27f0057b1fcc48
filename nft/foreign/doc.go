// Package foreign looks at the other programs that masquerade on this node: the
// chains that agents based on iptables left behind, and the rules that masquerade
// what the configuration exempts.
//
// [Read] takes a picture of all rules that a packet can meet in a base chain of
// type nat at the postrouting hook. It reads those chains and no others, however
// many there are. [Legacy] and [Conflicts] are pure functions of the picture.
//
// A priority excuses nobody: where our chain returns, chains behind it still
// decide, and a chain before it that masquerades has bound the connection.
//
// What is not seen: rules in legacy ip_tables, for which see [LegacyChains],
// tables of other families than ip, ip6 and inet, and NAT done outside
// netfilter. Which chain a verdict map leads to is not read: each chain of the
// table that no rule jumps to counts as reachable through it.
package foreign

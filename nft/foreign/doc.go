// Package foreign reads the rules of other programs on this node: what iptables-based
// agents left behind, rules that contradict the policy, connections that other
// programs may have translated, and the way of one packet.
//
// [Read] takes a snapshot of the chains that packets pass as they leave, and of those
// before connection tracking, with the small sets and verdict maps that they refer to.
// [Legacy], [Conflicts] and [FindRewrites] are functions of the snapshot. A
// [Tracer] reads the chains of all hooks.
//
// One interpreter follows packets through the rules: from one address to another, or all
// at once. Their addresses are sets, which each rule divides into the packets that match it
// and the others. A condition on anything that is not known of them may be true or false:
// then both are followed. What may happen to a packet is never missed; within the bounds,
// what is reported is little more.
//
// The priority of a chain of type nat does not matter for conflicts: if our chain returns,
// later chains still run, and an earlier chain that masquerades has already translated the
// connection.
//
// Not read are rules in legacy ip_tables (see [LegacyRules]), families other than ip, ip6
// and inet, and NAT outside netfilter; in a snapshot, also the forward hook, except base
// chains that drop by policy, and prerouting after connection tracking. A verdict map that
// is too large to read may lead to each chain of its table.
package foreign

// Package xtables is mode iptables-nft: how a policy is laid out in the tables ip nat and
// ip6 nat, which iptables shares with everybody, what the kernel holds there of ours, how
// it differs, the transactions that repair it, and the policy that it decides by.
//
// It commits nothing: package kernel does.
package xtables

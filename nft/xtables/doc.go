// Package xtables is about the tables that iptables shares with all programs, ip nat and ip6 nat. It
// implements mode iptables-nft: it compiles a policy to rules there, reads our rules, compares them
// with the wanted ones, and plans repairs. It also finds and removes the chains of masquerade agents:
// those that iptables-based agents, which this one replaces, left there, and our own that are no
// longer wanted.
//
// Compiling is pure: compile.go has the rules, statements.go what they consist of, chainname.go the names that iptables
// accepts. [Read] reads our chain (read.go), differences.go compares it, switch.go writes it, and jump.go places the
// jump to it in POSTROUTING. counters.go reads the counters. Package kernel commits. Chains of agents are in older.go,
// and tables of legacy ip_tables, which nf_tables does not show, in legacy.go.
package xtables

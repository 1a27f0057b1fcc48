// Package xtables is about the tables that iptables shares with all programs, ip nat and ip6 nat. It
// implements mode iptables-nft: it compiles a policy to rules there, reads our rules, compares them
// with the wanted ones, and plans repairs. It also finds and removes the chains of masquerade agents:
// those that iptables-based agents, which this one replaces, left there, and our own that are no
// longer wanted.
//
// Compiling (compile.go, statements.go, chainname.go) is pure. [Read] reads (read.go);
// comparing (differences.go) and planning (switch.go) work on what was read. Package
// kernel commits. Chains of agents are in older.go, tables of legacy ip_tables, which nf_tables does
// not show, in legacy.go.
package xtables

// Package xtables implements mode iptables-nft: it compiles a policy to rules in
// the tables ip nat and ip6 nat, which iptables shares with all programs, reads
// our rules there, compares them with the wanted ones, and plans repairs.
//
// Compiling (compile.go, nodes.go, chainname.go) is pure. [Read] reads (read.go);
// comparing (differences.go) and planning (plan.go) work on what was read. Package
// kernel commits.
package xtables

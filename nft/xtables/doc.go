// Package xtables implements mode iptables-nft: it compiles a policy to rules in
// the tables ip nat and ip6 nat, which iptables shares with all programs, reads
// our rules there, compares them with the wanted ones, plans repairs, and reads
// back the policy.
//
// Compiling (compile.go, nodes.go, chainname.go) is pure. Reading (read.go),
// comparing (differences.go), planning (plan.go) and decompiling (decompile.go)
// work on one table. Only a [Reader], for both tables, uses the kernel; package
// kernel commits.
package xtables

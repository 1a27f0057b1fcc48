// Package xtables holds all that is special about mode iptables-nft: how a policy is laid
// out in the tables ip nat and ip6 nat, which iptables shares with everybody, what the
// kernel holds there of ours, how it differs from what is wanted, what repairs it, and
// which policy it decides by.
//
// Compiling (compile.go, nodes.go, chainname.go) is pure. Reading (read.go), comparing
// (differences.go), planning (plan.go) and decompiling (decompile.go) are about one
// table. A [Reader] does what needs the kernel, for both; package kernel commits.
package xtables

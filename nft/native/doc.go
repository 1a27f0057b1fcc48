// Package native holds all that is special about mode nftables: how a policy is laid out
// in a table of our own, what the kernel holds of that table, how it differs from what is
// wanted, what repairs it, and which policy it decides by.
//
// Compiling (compile.go, nodes.go, enforce.go, snat.go, text.go) is pure. Reading and
// comparing (own.go), planning (stage.go) and decompiling (decompile.go) work on what was
// read. A [Reader] does what needs the kernel. It commits only what no rule refers to
// yet; package kernel commits everything else.
package native

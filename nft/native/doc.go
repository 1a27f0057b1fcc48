// Package native implements mode nftables: it compiles a policy to a separate
// table, reads the table in the kernel, compares it with the wanted one, plans
// repairs, and reads back the policy.
//
// Compiling (compile.go, nodes.go, enforce.go, snat.go, text.go) is pure.
// Comparing (own.go), planning (stage.go) and decompiling (decompile.go) work on
// what was read. Only a [Reader] uses the kernel. It commits only what no rule
// refers to yet; package kernel commits everything else.
package native

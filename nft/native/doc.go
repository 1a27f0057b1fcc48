// Package native implements mode nftables: it compiles a policy to a separate
// table, reads the table in the kernel, compares it with the wanted one, and plans
// repairs.
//
// Compiling (compile.go, nodes.go, enforce.go, snat.go, text.go) is pure. [Read] reads
// (read.go, elements.go), differences.go compares, stage.go fills sets, and switch.go plans the
// transaction that changes what packets see. Package kernel commits.
package native

// Package native implements mode nftables: it compiles a policy to a separate
// table, reads the table in the kernel, compares it with the wanted one, and plans
// repairs.
//
// Compiling (compile.go, nodes.go, enforce.go, snat.go, text.go) is pure. [Read] reads
// (table.go, content.go); comparing and planning (state.go) work on what was read.
// Package kernel commits.
package native

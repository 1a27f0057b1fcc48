// Package native implements mode nftables: it compiles a policy to a separate
// table, reads the table in the kernel, compares it with the wanted one, and plans
// repairs.
//
// Compiling is pure: compile.go has the table, statements.go what its rules consist of, snat.go, blocks.go, enforce.go
// and dropinvalid.go the chains of some keys, and text.go the table as text.
//
// [Read] reads (read.go) the table (table.go) and its rules, and finds out which sets are correct (sets.go,
// elements.go); differences.go compares everything else. fill.go fills sets, and switch.go decides which chains differ
// and plans the transaction that changes what packets see. Package kernel commits. counters.go reads the counters.
package native

// Package kernel is the loop that keeps the kernel to a ruleset, whatever its layout.
//
// A [Kernel] reads what is there, compares it with what is wanted, and writes
// only what differs. What packets see changes in one transaction: sets
// are filled before, under a name that no rule refers to yet (nft/README.md tells
// why). When the kernel rejects it, or the context ends before, the old rules stay.
//
// Others may write at the same time. A transaction that was planned on what is
// no longer there is rejected by the kernel, by the generation of the ruleset, and
// planned again; a difference counts when two reads agree on it.
//
// Errors of the kernel hold their errno; [Hint] says what they usually mean.
package kernel

// Package kernel keeps a ruleset of any layout in the kernel.
//
// A [Kernel] reads the current rules, compares them with the wanted ones, and
// writes only what differs. The verdicts change in one transaction: sets are
// filled before it, under a name that no rule refers to yet (nft/README.md has
// the reasons). If the kernel rejects it, or the context is canceled before it,
// the old rules stay.
//
// Other programs may write at the same time. Chains are written as a whole and by their names, which is right
// whatever others have committed. A transaction that needs more, such as the sets that were filled for it, has that
// as a condition: it is checked right before, and the kernel rejects the transaction if anybody has committed since;
// then both are repeated, for a few seconds. A difference counts if no other program wrote meanwhile, or if two reads
// agree.
//
// Errors from the kernel wrap their errno; [Hint] explains what they usually mean.
package kernel

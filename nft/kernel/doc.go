// Package kernel keeps a ruleset of any layout in the kernel.
//
// A [Kernel] reads the current rules, compares them with the wanted ones, and
// writes only what differs. The verdicts change in one transaction: sets are
// filled before it, under a name that no rule refers to yet (nft/README.md has
// the reasons). If the kernel rejects it, or the context is canceled before it,
// the old rules stay.
//
// Other programs may write at the same time. The kernel rejects the transaction that changes
// the verdicts if it was planned on an older generation of the ruleset, and it is planned
// again, for a few seconds; others touch nothing that rules refer to, and are not
// guarded. A difference counts if no other program wrote meanwhile, or if two reads agree.
//
// Errors from the kernel wrap their errno; [Hint] explains what they usually mean.
package kernel

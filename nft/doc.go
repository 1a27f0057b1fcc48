// Package nft defines the policy of a config, and the rules that it requires in the kernel.
//
// [Compile] is pure and compiles a config to a [Ruleset]: a small syntax tree
// whose statements have both text and bytecode. Tests load the text and compare the
// rules in the kernel with the bytecode. [Ruleset.String] is what `nft -f`, or in
// mode iptables-nft `iptables-restore --noflush`, accepts.
//
// The conditions of a policy are one table, [config.Conditions]: the keys of the
// file, the order of evaluation, sets, comments and explanations are derived
// from its rows.
//
// A [Layout] defines how a policy is written to the kernel: package native has
// its own table, and package xtables the chain that iptables lists. Package
// kernel keeps the ruleset of a layout in the kernel.
//
// The contract with other programs on the node: the table inet nft-masq-agent is
// ours, and additions of other programs to it are deleted. In the shared tables of
// iptables-nft, our chain and the jump to it are ours, and nothing else is
// touched. Our base chain runs at priority srcnat + 10: programs that must run
// before us use a smaller number.
//
// These packages do not read files, log or exit: they only return values and
// errors. README.md in this directory explains how the rules are updated without
// a gap.
package nft

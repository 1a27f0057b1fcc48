// Package nft says what a config decides, and which rules the kernel is to hold for it.
//
// The middle is a value. [Compile] is pure and turns a config into a [Ruleset]: a
// small syntax tree whose nodes have both their text and their bytecode. Tests
// load the text and compare what the kernel then holds to the bytecode.
// [Ruleset.String] is what `nft -f`, or in mode iptables-nft
// `iptables-restore --noflush`, accepts.
//
// What a policy can ask is one table, [config.Conditions]: the keys of the file,
// the order of the questions, sets, comments, explanations and read-back follow
// from its rows.
//
// How a policy is written into the kernel is a [Layout]: package native has its own table,
// and package xtables the chain that iptables shows. Package kernel keeps the kernel to a
// ruleset of either.
//
// The contract with everybody else on the node: the table inet nft-masq-agent is
// ours alone, and what other programs put into it is deleted. In the tables that
// iptables-nft shares with everybody, our chain and the jump to it are ours, and
// nothing else is touched. Our base chain runs at priority srcnat + 10: whoever
// wants to decide before us uses a smaller number.
//
// None of these packages reads files, logs or ends anything: values and errors
// are all that they give. README.md in this directory says how the rules change
// without a gap.
package nft

// Package nft turns a config into the rules that the kernel is to hold.
//
// The middle is a value. [Compile] is pure and makes a [Ruleset] of a config: a
// small syntax tree whose nodes know both their text and their bytecode, so that
// what is printed and what is sent cannot drift apart. [Ruleset.String] is what
// `nft -f`, or in mode iptables-nft `iptables-restore --noflush`, accepts.
//
// Package kernel keeps the kernel to a ruleset; package tables compares and
// plans for it, table by table. Beside them foreign looks at what other programs
// do, ruletext reads any rule, and nfnetlink speaks to the kernel.
//
// The contract with everybody else on the node: the table inet nft-masq-agent is
// ours alone, and what others put into it is deleted. In the tables that
// iptables-nft shares with everybody, our chain and the jump to it are ours, and
// nothing else is touched. Our base chain runs at priority srcnat + 10: whoever
// wants to decide before us uses a smaller number.
//
// None of these packages reads files, logs or ends anything: values and errors
// are all that they give. README.md in this directory says how the rules change
// without a gap.
package nft

// Package nft turns a config into rules of the kernel and keeps the kernel to
// them.
//
// The middle is a value. [Compile] is pure and makes a [Ruleset] of a config: a
// small syntax tree whose nodes know both their text and their bytecode, so that
// what is printed and what is sent cannot drift apart. [Ruleset.String] is what
// `nft -f`, or in mode iptables-nft `iptables-restore --noflush`, accepts.
//
// A [Kernel] reads what is there, compares it with what is wanted, and writes
// only where the two differ. What packets see changes in one transaction: sets
// are filled before, under a name that no rule refers to yet (stage.go tells
// why). When the kernel refuses, the old rules stay.
//
// The contract with everybody else on the node: the table inet nft-masq-agent is
// ours alone, and what others put into it is deleted. In the tables that
// iptables-nft shares with everybody, our chain and the jump to it are ours, and
// nothing else is touched. Our base chain runs at priority srcnat + 10: whoever
// wants to decide before us uses a smaller number.
//
// The package reads no files, logs nothing and ends nothing: values and errors
// are all that it gives. Errors of the kernel hold their errno; [Hint] says what
// they usually mean.
package nft

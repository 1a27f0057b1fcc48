// Package rule is the one decoder of rules as the kernel has them, for those that we
// write and those of other programs: step by step ([Statements]), and as text ([String]) in the
// syntax of nft or, for xtables expressions, of iptables.
//
// It knows the expressions that NAT rules consist of, and does not guess: an unknown
// expression is <name> in the text.
package rule

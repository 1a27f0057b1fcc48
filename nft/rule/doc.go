// Package rule reads rules as the kernel has them: step by step
// ([Statements]) for who asks what a rule does, and as text ([String]) for
// messages, in the words of nft or, for what came by xtables, of iptables.
//
// It understands what rules of NAT are made of, and guesses nothing: what it
// does not know stands in the text as <name>.
package rule

// Package agent starts nft-masq-agent in a network namespace, for tests,
// measurements and the demonstration: all of them wait for what it does by
// reading its log.
package agent

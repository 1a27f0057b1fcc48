// Package agent starts nft-masq-agent in a network namespace, for tests,
// measurements and the demonstration. They wait for its actions by reading its
// log.
package agent

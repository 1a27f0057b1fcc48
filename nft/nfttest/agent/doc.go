// Package agent starts nft-masq-agent in a network namespace. It exists so that
// tests, benchmarks and the demonstration all wait for what the agent does in the
// same way: by the events in its log.
package agent

// Package native is mode nftables: how a policy is laid out in a table of our own, what
// the kernel holds of that table, how it differs, the transactions that repair it, and
// the policy that it decides by.
//
// It commits nothing: package kernel does.
package native

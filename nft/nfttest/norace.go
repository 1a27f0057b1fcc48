//go:build !race

package nfttest

// Race is whether the race detector is on.
const Race = false

//go:build race

package nfttest

// Race is whether the race detector is on. It multiplies memory and processor time, so tests do not compare these with
// their bounds then.
const Race = true

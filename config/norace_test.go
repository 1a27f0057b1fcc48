//go:build !race

package config

// hostileSize is the size of a hostile input, in bytes.
const hostileSize = 1 << 19

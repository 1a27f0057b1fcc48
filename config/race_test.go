//go:build race

package config

// hostileSize is smaller here: the race detector makes these inputs slow.
const hostileSize = 1 << 17

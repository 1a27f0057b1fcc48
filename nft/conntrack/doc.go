// Package conntrack reads the connections that the kernel tracks, over ctnetlink,
// and deletes individual ones.
//
// A dump is streamed: its memory does not depend on the size of the table. The kernel returns
// the entries in hash order, so the first N of a dump are a random sample.
//
// Errors wrap the kernel's errno and, if the cause is known, [ErrNotPermitted] or
// [ErrUnsupported].
package conntrack

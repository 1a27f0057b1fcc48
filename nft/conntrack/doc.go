// Package conntrack reads the connections that the kernel tracks, over
// ctnetlink, and deletes single ones.
//
// A dump is streamed: the memory it takes does not depend on the size of the
// table. The kernel filters by family and, since Linux 5.15, by status; older
// kernels send everything and the rest is dropped here. The kernel keeps the
// entries in hash order, so that the first N of a dump are a random sample.
//
// Errors hold the kernel's errno and, if the cause is known, [ErrNotPermitted] or
// [ErrUnsupported].
package conntrack

// Package node reads the addresses of a node, and follows them. Its [Reader] is the only
// decoder of rtnetlink(7).
//
// Each function opens a socket of its own in the network namespace of the calling thread,
// [Follow] in that of the process, and reads everything; nothing is cached, and nothing is
// written. No privilege is needed. Errors wrap the kernel's errno.
package node

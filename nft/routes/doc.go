// Package routes reads what only those need to know about a node who look at it: its
// interfaces, its pods, and the route that a connection takes.
//
// Each function opens a socket of its own in the network namespace of the calling thread,
// and reads everything; nothing is cached, and nothing is written. No privilege is needed.
// Errors wrap the kernel's errno.
package routes

// Package nodeaddr follows the addresses of a node by rtnetlink.
//
// An address counts while connections can leave from it and replies come back to it: it
// is a global unicast address, of an interface that is up, and duplicate address
// detection is done with it. So an IPv4 address goes when its interface is set down,
// though the kernel keeps it and sends no RTM_DELADDR.
package nodeaddr

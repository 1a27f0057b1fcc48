// Package nodeaddr follows the addresses of a node by rtnetlink.
//
// An address counts while connections can use it as their source and receive
// replies: it is a global unicast address of an interface that is up, and
// duplicate address detection is complete. So an IPv4 address stops counting when
// its interface is set down, although the kernel keeps it and sends no
// RTM_DELADDR.
package nodeaddr

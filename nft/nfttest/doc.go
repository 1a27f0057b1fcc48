// Package nfttest provides network namespaces with real packets for tests and the
// demonstration.
//
// A Topology is a node as the agent sees it: with a pod, an outside host, and
// IPv4 and IPv6 on both links.
//
//	pod               eth0 ── pod0  node  eth0 ── eth0  outside
//	10.244.1.2          10.244.1.1  192.0.2.1           192.0.2.100, 198.51.100.1, 10.9.0.9, …
//	fd00:10:244:1::2    …:1::1      2001:db8::1         2001:db8::100, 2001:db8:1::1, fd00:9::9, …
//
// Send sends one packet or opens one connection and returns the source address
// that the far end saw. A Hammer does so a million times and counts.
//
// Guarantees:
//   - A namespace has no name and no file: nothing stays in /run/netns, and it
//     is gone when it is closed and its last process has ended.
//   - The caller's own namespace is never changed.
//   - Programs see an empty /etc/networks and no resolver, so that
//     `iptables -L` prints the same everywhere and does not wait for DNS.
//   - A test that needs the kernel and cannot have it is skipped by Require, and
//     fails instead when REQUIRE_KERNEL=1 is set.
//
// Functions that take a testing.TB fail the test on an error. Functions named
// Open… and all methods return it, and can be used outside tests.
package nfttest

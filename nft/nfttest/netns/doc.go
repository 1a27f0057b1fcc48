// Package netns creates network namespaces, runs functions and programs inside
// them, connects them and captures the packets that arrive.
//
// A namespace has no name and no file: nothing stays in /run/netns. The caller's
// own namespace is never changed. Everything is done by system calls and
// rtnetlink; no program needs to be installed.
package netns

// Package health finds what keeps a policy from having an effect on a node although kernel
// and config agree. It exists so that status and the daemon ask the same questions: each is a
// check that reads a little of the node and returns a problem with an ID of [IDs].
//
// What cannot be read is a problem of its own (unchecked), and claims nothing.
package health

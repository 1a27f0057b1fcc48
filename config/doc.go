// Package config reads the configuration of a masquerade agent: a YAML or JSON
// file, or a directory of them.
//
// [Read] fetches the bytes, [Parse] turns them into a [Config]; both keep no
// state and log nothing. Parse reports every [Problem] of every file with its
// place, and never gives half a Config: beside an error it is zero.
//
// A file that the agents of the iptables generation accept is accepted with the
// same meaning. Refused beyond that are only: a key given twice, a likely slip
// of a key, a second document, an IPv4-mapped prefix, an empty entry, an
// interval of zero or less, and keys of this agent with a value of another type.
// [Lenient] returns what those agents make of such a file.
//
// No input makes Parse panic, nor take more than linear time. The values are
// counted before they are read, so that 4 MiB of anything take less than 64 MB.
// Nothing of a file that does not look like a config is quoted.
package config

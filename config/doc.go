// Package config reads the configuration of a masquerade agent: a YAML or JSON
// file, or a directory of them. It exists so that what a file means, and what the
// older agents make of it, is decided and fuzzed in one place that knows no kernel.
//
// [Read] fetches the bytes, [Parse] turns them into a [Config]; neither keeps
// state or logs. Parse reports every [Problem] in every file with its position,
// and never returns a partial Config: with an error it is zero.
//
// A file that the iptables-based agents accept is accepted with the same meaning,
// except that these are errors: a duplicate key, a likely misspelling of a key, a
// second document, an IPv4-mapped prefix, an empty entry, an interval of zero or
// less, and a value of the wrong type for a key that only this agent has.
// [Lenient] returns what the older agents make of such a file.
//
// No input makes Parse panic or take more than linear time. Values are counted
// before they are read, so that 4 MiB of any input take less than 64 MB. Messages
// quote nothing from a file that does not look like a config.
package config

// Package config reads the configuration of a masquerade agent: a YAML or JSON
// file, or a directory of them. It exists so that the meaning of a file, to this
// agent and to the older ones, is defined and fuzzed in one place that knows no
// kernel.
//
// [Read] fetches the bytes, [Parse] turns them into a [Config] and its [Problems];
// neither keeps state or logs. Each problem has a position and a [Level]: an error
// is anything that the iptables-based agents reject, too, or a key of this agent
// that cannot be applied; a mistake is anything that they ignore, or read
// differently than a person would. If there are only mistakes, the Config is the
// one that they would use.
//
// A file that they accept has no errors and the same meaning, except that these are
// errors: a Kubernetes manifest, an IPv4-mapped prefix, values beyond the bounds of this package, and
// what only their library accepts (two byte order marks, empty entries of a list, the tags ! and
// !!binary, numbers and prefix lengths that are not decimal).
//
// No input makes Parse panic or take more than linear time. Values are counted
// before they are read, so that 4 MiB of any input take less than 64 MB. Messages
// quote nothing from a file that does not look like a config.
package config

// Package judge answers what a policy means for connections: the verdict about one, and its
// reasons; whether it masquerades any; the addresses and the ports that a connection leaves from.
// The agent does not need it to make the rules.
package judge

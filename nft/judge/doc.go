// Package judge answers what a policy means for connections: the verdict about one, and its
// reasons; the traffic that is masqueraded, or that is of pods; the addresses and the ports
// that a connection leaves from. The agent does not need it to make the rules.
//
// A [Region] is the traffic that a policy masquerades, a product of four sets. The difference
// of two regions is the effect of a new config. Connections and other programs' rules are
// judged by regions, too, not by conditions.
package judge

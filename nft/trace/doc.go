// Package trace follows one packet through the rules of this node, and says what other
// programs' rules do to it: [Tracer.Trace]. Which packets the rules treat alike follows from
// what they compare addresses with: [Tracer.Ends].
//
// At equal priority any chain may be the first: no translation there is certain, nor for one of them a
// mark that another may change.
//
// The addresses of the packet are known; every other fact is known or not. A [Truth] is how
// certain something is, and there is no other word for that: of a condition, whether the packet
// satisfies it; of a rule, whether the packet meets it. What may happen is never missed: what is
// not known may be true or false, and both are followed.
//
// What is known of an expression, and in which direction it errs:
//
//	expression                       known                                  else, because
//	ip saddr, daddr (also masked)    yes; after NAT, in postrouting, the    after a write of parts, and after NAT to
//	                                 new source                             an address that is not known: maybe
//	meta nfproto, protocol           yes
//	meta l4proto, ip protocol,       if the packet has them                 maybe: explain asks for addresses
//	  th dport
//	th sport                                                                maybe: the program that connects chooses it
//	iif, oif, iifname, oifname       where the packet has passed them       maybe: the route is not known before
//	fib saddr type, daddr type       without an interface                   maybe: that depends on the table
//	ct state, ct status              of a new connection; before            maybe, if the connection exists,
//	                                 connection tracking the state is       may be untracked, or has a zone or a
//	                                 invalid, and there is no status        timeout already: then notrack is maybe
//	meta mark                        what rules have set; not set:          maybe: others, tc and sockets set marks
//	                                 exactly the bit 0x4000 (kube-proxy)
//	                                 or 0x2000 (portmap) alone
//	numgen, jhash mod n              one of n values                        maybe one of them; each of them: yes
//	a number in network order                                               maybe: nft swaps it to compare ranges
//	a set or a map                   if it was read, or asked for one       maybe: more than 10,000 elements, of a
//	                                 address                                survey
//	an element with a limit or                                              maybe
//	  quota, also one declared in a
//	  set
//	a dynamic set;                                                          maybe: packets change it, and a full one
//	  add, update (dynset)                                                  breaks a rule off
//	limit, quota, ct count, a named                                         maybe
//	  one (objref), -m anything
//	queue, tproxy, synproxy,                                                code unknown, maybe: another program decides
//	  NFQUEUE, any other target
//	an expression without a name                                            code unknown, maybe
//	a chain with too many rules,                                            code unknown: anything may happen in them
//	  a map of verdicts not read
//
// Effects: masquerade, snat (also to a map, and prefix: the address follows from the source),
// dnat and redirect, notrack before connection tracking, a header that is written, the mark, and
// the verdicts; reject, REJECT and TARPIT end a connection like drop. Chains of type nat end at
// accept, but the next one is still asked.
//
// Not read are rules in legacy ip_tables, families other than ip, ip6 and inet, hooks of devices (ingress,
// egress), which [Rules] names, connection tracking zones, and NAT outside netfilter.
package trace

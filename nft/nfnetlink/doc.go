// Package nfnetlink sends requests over netlink ([Conn.Exchange]), tries again what others
// disturbed ([Again]), and implements the nf_tables subsystem: transactions and dumps.
// It reads single facts of rules ([Rule.Comment], [Rule.Target]), and does not interpret them.
//
// A transaction is a [Batch]: messages between a begin and an end message that
// the kernel accepts as a whole or not at all. [Conn.Commit] sends it in one
// sendmsg, because the kernel discards the first half of a batch that is split
// over two.
//
// Objects read back keep the kernel's bytes: an [Expr] is a name and its raw
// attributes, so that an expression unknown to any library still counts as a
// difference. Expressions to be sent come from github.com/google/nftables (see
// [Marshal]). That library's connection is not used, for four reasons: its
// masquerade expression omits the flag without which the kernel ignores a port
// range, its parser drops expressions that it does not know, it cannot report
// that a dump was interrupted, and it reads sets in such small pages that a dump
// of 100,000 elements takes five times as long.
//
// The attributes are those of include/uapi/linux/netfilter/nf_tables.h, Linux 6.18.
package nfnetlink

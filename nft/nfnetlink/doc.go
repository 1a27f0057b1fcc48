// Package nfnetlink speaks the nf_tables subsystem of netlink: transactions,
// dumps and change notifications, and nothing about what the rules mean: that is
// for package ruletext.
//
// A transaction is a [Batch]: messages between a begin and an end message that
// the kernel takes whole or not at all. [Conn.Commit] sends it in one sendmsg,
// because the kernel throws the first half away when a batch is split over two.
//
// Objects read back keep the bytes of the kernel: an [Expr] is a name and its
// raw attributes, so that an expression which no library knows still counts as
// a difference. Expressions to be sent come from github.com/google/nftables
// (see [Marshal]). That library's own connection is not used, for four reasons:
// its masquerade expression leaves out the flag without which the kernel
// ignores a port range, its parser drops expressions that it does not know, it
// has no way to say that a dump was torn, and it reads a set in pages so small
// that a dump of 100,000 elements takes five times as long.
//
// The layouts are those of include/uapi/linux/netfilter/nf_tables.h, Linux 6.18.
package nfnetlink

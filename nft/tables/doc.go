// Package tables is what the kernel holds of the tables in which we have rules:
// [Own], the table of mode nftables, which is ours alone, and [Shared], the
// tables ip nat and ip6 nat that mode iptables-nft shares with everybody.
//
// It reads a table, says in words how it is not the wanted one, plans the
// transactions that make it so, and reads the policy back that a table of ours
// decides by. It commits nothing: package kernel does.
package tables

package kernel

import (
	"errors"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
)

// Rejected reports whether the kernel rejected rules. Other errors mean that they could not be read, or
// [nfnetlink.ErrBusy]. With EMSGSIZE the kernel has not seen them: the transaction did not fit the send buffer.
func Rejected(err error) bool {
	var rejected *nfnetlink.RejectedError
	return !Delayed(err) && (errors.As(err, &rejected) || errors.Is(err, unix.EMSGSIZE))
}

// Delayed reports whether an error is [nfnetlink.ErrBusy]: the same rules are accepted later.
func Delayed(err error) bool { return errors.Is(err, nfnetlink.ErrBusy) }

// Hint explains what an error from the kernel usually means, "" if there is
// nothing to add. The kernel must have NFT_NAT, NFT_MASQ, NFT_FIB_INET and, in
// mode iptables-nft, NFT_COMPAT with the xtables extensions.
func Hint(err error) string {
	var rejected *nfnetlink.RejectedError
	lacking := errors.As(err, &rejected) && nfnetlink.IsAny(err, unix.ENOENT, unix.EOPNOTSUPP)
	switch {
	case errors.Is(err, unix.EPERM) && rejected != nil:
		// Without the capability, reading would have failed already.
		return "another process owns the table (nft list tables shows flags owner); the agent writes its rules after that " +
			"process exits"
	case errors.Is(err, unix.EPERM):
		return "the capability NET_ADMIN in the network namespace of the node is missing: run as root there; a pod needs " +
			"hostNetwork, runAsUser: 0 and capabilities: {add: [NET_ADMIN]}"
	case errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EAFNOSUPPORT):
		return "the kernel lacks nf_tables (CONFIG_NF_TABLES, CONFIG_NF_TABLES_INET), or it may not be loaded from here: " +
			"modprobe nf_tables on the node"
	case errors.Is(err, unix.EMSGSIZE):
		return "the transaction does not fit the send buffer: raise net.core.wmem_max"
	case errors.Is(err, unix.ENOMEM):
		return "the kernel has no memory for the rules"
	case lacking && rejected.Op == nfnetlink.CreateChain:
		return "the kernel lacks chains of type nat (CONFIG_NFT_NAT, CONFIG_NF_NAT; for inet Linux 5.2), or may not load " +
			"them: modprobe nft_chain_nat on the node"
	case lacking && rejected.Op == nfnetlink.CreateRule:
		return "the kernel lacks an expression of the rules: NFT_MASQ, NFT_FIB_INET, NFT_NUMGEN (--to-ports); in mode " +
			"iptables-nft NFT_COMPAT, xt_MASQUERADE, xt_comment, xt_addrtype, xt_statistic (--to-ports). Load them on the " +
			"node: modprobe nft_masq nft_fib_inet"
	}
	return ""
}

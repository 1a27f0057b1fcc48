package running

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// listening reports whether a process has a socket that receives nf_tables
// notifications, according to /proc/PID/net/netlink.
func listening(proc string, pid int) bool {
	dir := filepath.Join(proc, strconv.Itoa(pid))
	table, err := os.ReadFile(filepath.Join(dir, "net", "netlink"))
	if err != nil {
		return false
	}
	sockets := map[string]bool{}
	for line := range strings.Lines(string(table)) {
		f := strings.Fields(line) // sk Eth Pid Groups Rmem Wmem Dump Locks Drops Inode
		if len(f) < 10 || f[1] != strconv.Itoa(unix.NETLINK_NETFILTER) {
			continue
		}
		groups, err := strconv.ParseUint(f[3], 16, 32)
		if err == nil && groups&(1<<(unix.NFNLGRP_NFTABLES-1)) != 0 {
			sockets[fmt.Sprintf("socket:[%s]", f[9])] = true
		}
	}
	fds, _ := os.ReadDir(filepath.Join(dir, "fd"))
	for _, fd := range fds {
		if target, err := os.Readlink(filepath.Join(dir, "fd", fd.Name())); err == nil && sockets[target] {
			return true
		}
	}
	return false
}

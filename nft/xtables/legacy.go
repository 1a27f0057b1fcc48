package xtables

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
)

// A LegacyTable is a table of legacy ip_tables that has rules or chains, which nf_tables
// neither shows nor removes.
type LegacyTable struct {
	Family nfnetlink.Family
	Table  string
	// Older means that it is a nat table with a chain of an iptables-based agent, by its name.
	Older bool
}

// String returns family and name.
func (t LegacyTable) String() string { return t.Family.String() + " " + t.Table }

// Command returns the shell command that shows the table.
func (t LegacyTable) Command() string {
	return fmt.Sprintf("%stables-legacy -t %s -S", t.Family, t.Table)
}

// LegacyTables returns the tables of legacy ip_tables that have rules or chains, of the network namespace of this
// thread. It reads which tables exist from a directory such as /proc/thread-self/net, because to ask for one that does
// not exist would create it. If there are any, it needs NET_ADMIN.
func LegacyTables(dir string) (found []LegacyTable, err error) {
	for _, family := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} {
		f := xtFamilies[family]
		names, err := os.ReadFile(filepath.Join(dir, f.names))
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return nil, err
		}
		existing := strings.Fields(string(names))
		for _, table := range []string{"raw", "mangle", "nat", "filter"} {
			if !slices.Contains(existing, table) {
				continue
			}
			entries, err := f.read(table)
			if err != nil && !nfnetlink.IsAny(err, unix.ENOENT, unix.ENOPROTOOPT) { // it may have gone meanwhile
				return nil, fmt.Errorf("legacy ip_tables: table %s %s: %w", family, table, err)
			}
			if len(entries) == 0 {
				continue
			}
			older := table == NATTable && slices.ContainsFunc(agentChains, func(chain string) bool {
				return bytes.Contains(entries, []byte("\x00"+chain+"\x00"))
			})
			found = append(found, LegacyTable{Family: family, Table: table, Older: older})
		}
	}
	return found, nil
}

// OlderTables returns those of [LegacyTables] that have rules of an iptables-based agent.
func OlderTables(dir string) ([]LegacyTable, error) {
	all, err := LegacyTables(dir)
	return slices.DeleteFunc(all, func(t LegacyTable) bool { return !t.Older }), err
}

type xtFamily struct {
	names         string // the file that lists the tables
	domain, level int
}

var xtFamilies = map[nfnetlink.Family]xtFamily{
	nfnetlink.IPv4: {"ip_tables_names", unix.AF_INET, unix.IPPROTO_IP},
	nfnetlink.IPv6: {"ip6_tables_names", unix.AF_INET6, unix.IPPROTO_IPV6},
}

// xtHooks is how many built-in chains a table has.
var xtHooks = map[string]int{"raw": 2, "mangle": 5, "nat": 4, "filter": 3}

// getsockopt options from include/uapi/linux/netfilter_ipv4/ip_tables.h, the offsets of the
// number and the size of the entries in struct ipt_getinfo, and the length of the header
// of struct ipt_get_entries. IPv6 has the same. An empty table has an entry at the end of
// each built-in chain and of the table.
const (
	xtGetInfo, xtGetEntries         = 64, 65
	xtInfoSize, xtCountAt, xtSizeAt = 84, 76, 80
	xtEntriesHead                   = 40
	maxXTSize                       = 64 << 20
)

// read returns all entries of a table as the kernel has them, none if nobody has added any to its built-in
// chains. It retries if they change in the meantime.
func (f xtFamily) read(table string) ([]byte, error) {
	fd, err := unix.Socket(f.domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fd) }()
	for range 5 {
		info := make([]byte, xtInfoSize)
		copy(info, table)
		if err := getsockopt(fd, f.level, xtGetInfo, info); err != nil {
			return nil, err
		}
		if int(binary.NativeEndian.Uint32(info[xtCountAt:])) <= xtHooks[table]+1 {
			return nil, nil
		}
		size := binary.NativeEndian.Uint32(info[xtSizeAt:])
		if size > maxXTSize {
			return nil, errors.New("is too large to read")
		}
		entries := make([]byte, xtEntriesHead+int(size))
		copy(entries, table)
		binary.NativeEndian.PutUint32(entries[32:], size)
		err := getsockopt(fd, f.level, xtGetEntries, entries)
		if err == nil {
			return entries[xtEntriesHead:], nil
		}
		if !errors.Is(err, unix.EAGAIN) {
			return nil, err
		}
	}
	return nil, unix.EAGAIN
}

func getsockopt(fd, level, option int, value []byte) error {
	length := uint32(len(value))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option),
		uintptr(unsafe.Pointer(&value[0])), uintptr(unsafe.Pointer(&length)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

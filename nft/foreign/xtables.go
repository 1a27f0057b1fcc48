package foreign

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
)

// An XTChain is the chain of an iptables-based agent in a nat table of legacy
// ip_tables, which netlink neither shows nor removes.
type XTChain struct {
	Family nfnetlink.Family
	Name   string
	Rules  int
	Jumps  []XTJump
}

// An XTJump is a rule that jumps to a chain. Number counts from 1 within its own chain.
type XTJump struct {
	Chain  string
	Number int
}

// String returns the name of the chain and what exists of it.
func (c XTChain) String() string {
	return fmt.Sprintf("chain %s in legacy ip_tables (table %s nat): %d rules, %d jumps", nfnetlink.Printable(c.Name), c.Family, c.Rules, len(c.Jumps))
}

// Decides reports whether packets reach rules of this chain.
func (c XTChain) Decides() bool { return c.Rules > 0 && len(c.Jumps) > 0 }

// Commands returns shell commands that remove the chain.
func (c XTChain) Commands() []string {
	program := "iptables-legacy -t nat "
	if c.Family == nfnetlink.IPv6 {
		program = "ip6tables-legacy -t nat "
	}
	var commands []string
	for _, j := range slices.Backward(c.Jumps) { // so that the numbers of earlier rules stay valid
		commands = append(commands, fmt.Sprintf("%s-D %s %d", program, nfnetlink.ShellWord(j.Chain), j.Number))
	}
	return append(commands, program+"-F "+nfnetlink.ShellWord(c.Name), program+"-X "+nfnetlink.ShellWord(c.Name))
}

// LegacyChains finds the chains of iptables-based agents in the nat tables of
// legacy ip_tables in this network namespace. The directory is as for
// [LegacyIPTables]: a table that does not exist is not read, because that would
// create it. It needs NET_ADMIN.
func LegacyChains(dir string) ([]XTChain, error) {
	var found []XTChain
	err := eachLegacyNAT(dir, func(f xtFamily, chains []xtChain) {
		found = append(found, f.agents(chains)...)
	})
	return found, err
}

// LegacyRules counts the rules in the nat tables of legacy ip_tables in this network
// namespace, of one family. The directory is as for [LegacyChains].
func LegacyRules(dir string, family nfnetlink.Family) (n int, err error) {
	err = eachLegacyNAT(dir, func(f xtFamily, chains []xtChain) {
		for _, c := range chains {
			if f.family == family {
				n += max(0, len(c.comments)-1) // without the rule at the end
			}
		}
	})
	return n, err
}

// LegacyIPTables lists the tables of legacy ip_tables, such as "ip nat", that
// exist in a network namespace. It reads them from a directory such as /proc/net
// or /proc/thread-self/net. A table may be unused: the kernel creates it when a
// program first reads it, and does not report how many rules it contains. Without
// legacy ip_tables in the kernel, the list is empty.
//
// `iptables-legacy -t TABLE -S`, or ip6tables-legacy, lists the rules.
func LegacyIPTables(dir string) (tables []string, err error) {
	for _, f := range xtFamilies {
		text, err := os.ReadFile(filepath.Join(dir, f.names))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("legacy ip_tables: %w", err)
		}
		for _, table := range strings.Fields(string(text)) {
			tables = append(tables, f.family.String()+" "+table)
		}
	}
	return tables, nil
}

// eachLegacyNAT reads the nat tables of legacy ip_tables that exist.
func eachLegacyNAT(dir string, fn func(xtFamily, []xtChain)) error {
	tables, err := LegacyIPTables(dir)
	if err != nil {
		return err
	}
	for _, f := range xtFamilies {
		if !slices.Contains(tables, f.family.String()+" nat") {
			continue
		}
		entries, hooks, err := f.read()
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOPROTOOPT) {
			continue // gone meanwhile
		}
		if err != nil {
			return fmt.Errorf("legacy ip_tables: table %s nat: %w", f.family, err)
		}
		fn(f, f.chains(entries, hooks))
	}
	return nil
}

// An xtFamily describes struct ipt_entry or ip6t_entry: where the offsets of the
// target and of the next entry are, two uint16, and where the matches begin.
type xtFamily struct {
	family        nfnetlink.Family
	names         string // the file that lists the tables
	domain, level int
	offsets, size int
}

var xtFamilies = []xtFamily{
	{nfnetlink.IPv4, "ip_tables_names", unix.AF_INET, unix.IPPROTO_IP, 88, 112},
	{nfnetlink.IPv6, "ip6_tables_names", unix.AF_INET6, unix.IPPROTO_IPV6, 140, 168},
}

// getsockopt options from include/uapi/linux/netfilter_ipv4/ip_tables.h, the
// offset of the size in struct ipt_getinfo, and the length of the header of
// struct ipt_get_entries. IPv6 has the same.
const (
	xtGetInfo, xtGetEntries = 64, 65
	xtInfoSize, xtSizeAt    = 84, 80
	xtEntriesHead           = 40
	maxXTSize               = 64 << 20
)

// read returns the entries of the table, and the built-in chains by the offset of
// their first rule. It retries if they change in the meantime.
func (f xtFamily) read() (entries []byte, hooks map[int]string, err error) {
	fd, err := unix.Socket(f.domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = unix.Close(fd) }()
	for range 5 {
		info := make([]byte, xtInfoSize)
		copy(info, "nat")
		if err := getsockopt(fd, f.level, xtGetInfo, info); err != nil {
			return nil, nil, err
		}
		hooks = map[int]string{}
		for i, name := range []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"} {
			if binary.NativeEndian.Uint32(info[32:])&(1<<i) != 0 { // valid_hooks
				hooks[int(binary.NativeEndian.Uint32(info[36+4*i:]))] = name // hook_entry
			}
		}
		size := binary.NativeEndian.Uint32(info[xtSizeAt:])
		if size > maxXTSize {
			return nil, nil, errors.New("is too large to read")
		}
		entries = make([]byte, xtEntriesHead+int(size))
		copy(entries, "nat")
		binary.NativeEndian.PutUint32(entries[32:], size)
		switch err := getsockopt(fd, f.level, xtGetEntries, entries); {
		case err == nil:
			return entries[xtEntriesHead:], hooks, nil
		case !errors.Is(err, unix.EAGAIN):
			return nil, nil, err
		}
	}
	return nil, nil, unix.EAGAIN
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

// An xtChain is a chain with the comments and jump targets of its rules.
type xtChain struct {
	name     string
	builtIn  bool
	start    int // offset of its first rule
	comments []string
	verdicts []int // offsets, negative for none
}

// chains splits the entries: an entry with target ERROR begins a chain and
// contains its name. Each chain ends with a rule that iptables does not list.
func (f xtFamily) chains(b []byte, hooks map[int]string) []xtChain {
	chains := []xtChain{{builtIn: true}}
	for at := 0; at+f.size <= len(b); {
		target := int(binary.NativeEndian.Uint16(b[at+f.offsets:]))
		next := int(binary.NativeEndian.Uint16(b[at+f.offsets+2:]))
		if next < f.size || target < f.size || at+next > len(b) || target+36 > next {
			break
		}
		if name, ok := hooks[at]; ok {
			chains = append(chains, xtChain{name: name, builtIn: true, start: at})
		}
		e := b[at : at+next]
		name, data := unix.ByteSliceToString(e[target+2:target+31]), e[target+32:]
		if name == "ERROR" {
			chains = append(chains, xtChain{name: unix.ByteSliceToString(data), start: at + next})
		} else {
			verdict := -1
			if name == "" {
				verdict = int(int32(binary.NativeEndian.Uint32(data)))
			}
			c := &chains[len(chains)-1]
			c.comments, c.verdicts = append(c.comments, xtComment(e[f.size:target])), append(c.verdicts, verdict)
		}
		at += next
	}
	return chains
}

// xtComment finds the comment among the matches of an entry.
func xtComment(b []byte) string {
	for len(b) >= 32 {
		size := int(binary.NativeEndian.Uint16(b))
		if size < 32 || size > len(b) {
			break
		}
		if name, _, _ := bytes.Cut(b[2:31], []byte{0}); string(name) == "comment" {
			return unix.ByteSliceToString(b[32:size])
		}
		b = b[size:]
	}
	return ""
}

// agents finds the chains of iptables-based agents, as [Legacy] does.
func (f xtFamily) agents(chains []xtChain) []XTChain {
	jumps := map[int][]XTJump{} // by target offset
	fromAgent := map[int]bool{}
	for _, c := range chains {
		for i, to := range c.verdicts[:max(0, len(c.verdicts)-1)] { // without the rule at the end
			if to > 0 && to != c.start {
				jumps[to] = append(jumps[to], XTJump{c.name, i + 1})
				fromAgent[to] = fromAgent[to] || agentJump.MatchString(c.comments[i])
			}
		}
	}
	var found []XTChain
	for _, c := range chains {
		own := func(text string) bool { return agentRule.MatchString(text) && !agentJump.MatchString(text) }
		if !c.builtIn && (agentChains[c.name] || fromAgent[c.start] || slices.ContainsFunc(c.comments, own)) {
			found = append(found, XTChain{Family: f.family, Name: c.name, Rules: max(0, len(c.comments)-1), Jumps: jumps[c.start]})
		}
	}
	return found
}

package foreign

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"nft-masq-agent/nft/nfnetlink"
)

// LegacyIPTables lists the tables of legacy ip_tables, such as "ip nat", that
// exist in a network namespace. It reads them from a directory such as /proc/net
// or /proc/thread-self/net. A table may be unused: the kernel creates it when a
// program first reads it, and does not report how many rules it contains. Without
// legacy ip_tables in the kernel, the list is empty.
//
// `iptables-legacy -t TABLE -S`, or ip6tables-legacy, lists the rules.
func LegacyIPTables(dir string) ([]string, error) {
	var tables []string
	for _, f := range []struct {
		family nfnetlink.Family
		file   string
	}{{nfnetlink.IPv4, "ip_tables_names"}, {nfnetlink.IPv6, "ip6_tables_names"}} {
		text, err := os.ReadFile(filepath.Join(dir, f.file))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("legacy ip_tables: %w", err)
		}
		for _, table := range strings.Fields(string(text)) {
			tables = append(tables, f.family.String()+" "+table)
		}
	}
	return tables, nil
}

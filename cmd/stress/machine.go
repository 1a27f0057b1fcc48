package main

import (
	"bufio"
	"fmt"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// machine describes the machine that this runs on.
type machine struct {
	release    string
	processors int
}

func thisMachine() (machine, error) {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return machine{}, fmt.Errorf("kernel: %w", err)
	}
	return machine{release: unix.ByteSliceToString(name.Release[:]), processors: runtime.NumCPU()}, nil
}

// looksUpInArrays reports whether nf_tables, which must be loaded, looks up
// addresses in sorted arrays. The release does not show this, because such
// changes are backported.
func looksUpInArrays() (bool, error) {
	file, err := os.Open("/proc/kallsyms")
	if err != nil {
		return false, fmt.Errorf("kernel: %w", err)
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		if strings.Contains(lines.Text(), " nft_array_") {
			return true, nil
		}
	}
	if err := lines.Err(); err != nil {
		return false, fmt.Errorf("kernel: %w", err)
	}
	return false, nil
}

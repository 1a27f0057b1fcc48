package main

import (
	"bufio"
	"fmt"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// machine is what matters of the one that this runs on.
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

// looksUpInArrays says whether nf_tables, which must be loaded, looks addresses
// up in sorted arrays. The release does not tell: such changes are ported to
// older kernels.
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

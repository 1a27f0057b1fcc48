package config

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// A PortRange is a range of ports, both ends included.
type PortRange struct{ Min, Max uint16 }

// Size returns the number of ports in the range.
func (r PortRange) Size() uint32 { return uint32(r.Max) - uint32(r.Min) + 1 }

// String returns the range as nft and iptables write it; a single port is a range
// of one.
func (r PortRange) String() string {
	if r.Min == r.Max {
		return strconv.Itoa(int(r.Min))
	}
	return fmt.Sprintf("%d-%d", r.Min, r.Max)
}

// A PodPorts is how many source ports each pod has of its own; 0: pods share all.
type PodPorts int

// Bounds of portsPerPod. 2,000 still makes 16 blocks of all ports.
const (
	minPortsPerPod = 16
	maxPortsPerPod = 2000
)

// ParsePorts parses a list of port ranges such as "1024-29999,32768-65535".
// Ranges may overlap, as with the older agents. Port 0 is not valid: a range that
// begins with 0 begins with 1.
func ParsePorts(s string) ([]PortRange, error) {
	if s == "" {
		return nil, nil
	}
	var ranges []PortRange
	for _, part := range strings.Split(s, ",") {
		r, err := parsePortRange(part)
		if err != nil {
			return nil, err
		}
		ranges = append(ranges, r)
	}
	return ranges, nil
}

func parsePortRange(s string) (PortRange, error) {
	lo, hi, isRange := strings.Cut(s, "-")
	if !isRange {
		hi = lo
	}
	first, err := parsePort(lo)
	if err != nil {
		return PortRange{}, fmt.Errorf("port range %q: %w", s, err)
	}
	last, err := parsePort(hi)
	if err != nil {
		return PortRange{}, fmt.Errorf("port range %q: %w", s, err)
	}
	switch {
	case first > last:
		return PortRange{}, fmt.Errorf("port range %q: %d is greater than %d", s, first, last)
	case last == 0:
		return PortRange{}, fmt.Errorf("port range %q: 0 is not a port", s)
	}
	return PortRange{max(first, 1), last}, nil
}

func parsePort(s string) (uint16, error) {
	n, err := strconv.Atoi(s)
	if err != nil || n < 0 || n > math.MaxUint16 {
		return 0, fmt.Errorf("%q is not a port from 1 to 65535", s)
	}
	return uint16(n), nil
}

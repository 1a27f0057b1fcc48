package nft

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// A Mark is a value and mask of the packet mark.
type Mark struct{ Value, Mask uint32 }

// String returns the mark as iptables writes it.
func (m Mark) String() string { return fmt.Sprintf("%#x/%#x", m.Value, m.Mask) }

// ParseMarks parses marks such as "0x4000/0x4000,0x2000/0x2000". Without a mask,
// all bits are compared.
func ParseMarks(s string) ([]Mark, error) {
	const limit = 8
	var marks []Mark
	for _, part := range strings.Split(s, ",") {
		value, mask, masked := strings.Cut(part, "/")
		v, err := strconv.ParseUint(value, 0, 32)
		m := uint64(1<<32 - 1)
		if err == nil && masked {
			m, err = strconv.ParseUint(mask, 0, 32)
		}
		switch {
		case err != nil:
			return nil, fmt.Errorf("%q is not a mark such as 0x4000/0x4000", part)
		case m == 0 || v&^m != 0 || v == 0:
			return nil, fmt.Errorf("%q matches no packet, or every one without a mark", part)
		}
		marks = append(marks, Mark{uint32(v), uint32(m)})
	}
	if len(marks) > limit {
		return nil, errors.New("has more than 8 marks")
	}
	return marks, nil
}

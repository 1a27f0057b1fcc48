package nfnetlink

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"
)

// attrs is a run of netlink attributes under construction.
type attrs []byte

const (
	attrHeaderLen = 4
	attrAlign     = 4
)

func (a *attrs) header(typ uint16, n int) {
	*a = binary.NativeEndian.AppendUint16(*a, uint16(attrHeaderLen+n))
	*a = binary.NativeEndian.AppendUint16(*a, typ)
}

func (a *attrs) pad() {
	for len(*a)%attrAlign != 0 {
		*a = append(*a, 0)
	}
}

func (a *attrs) bytes(typ uint16, b []byte) {
	a.header(typ, len(b))
	*a = append(*a, b...)
	a.pad()
}

func (a *attrs) str(typ uint16, s string) {
	a.header(typ, len(s)+1)
	*a = append(*a, s...)
	*a = append(*a, 0)
	a.pad()
}

// uint32 appends a number in network byte order, which nf_tables uses for all
// numbers.
func (a *attrs) uint32(typ uint16, v uint32) {
	a.header(typ, 4)
	*a = binary.BigEndian.AppendUint32(*a, v)
}

func (a *attrs) uint64(typ uint16, v uint64) {
	a.header(typ, 8)
	*a = binary.BigEndian.AppendUint64(*a, v)
}

// in returns the attributes of something in a table, whose name is the first attribute
// of every kind (NFTA_…_TABLE).
func in(table string, nameType uint16, name string) attrs {
	var a attrs
	a.str(unix.NFTA_CHAIN_TABLE, table)
	a.str(nameType, name)
	return a
}

// nest appends an attribute that contains what fill appends.
func (a *attrs) nest(typ uint16, fill func()) {
	at := len(*a)
	a.header(typ|unix.NLA_F_NESTED, 0)
	fill()
	binary.NativeEndian.PutUint16((*a)[at:], uint16(len(*a)-at))
}

// Each calls fn for every attribute of b, with the type's flag bits cleared. The
// data alias b: Each is called for every element of a set and avoids the copies
// that the library's decoder makes.
func Each(b []byte, fn func(typ uint16, data []byte) error) error {
	for len(b) >= attrHeaderLen {
		n := int(binary.NativeEndian.Uint16(b))
		typ := binary.NativeEndian.Uint16(b[2:]) &^ (unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
		if n < attrHeaderLen || n > len(b) {
			return fmt.Errorf("netlink attribute %d: length %d of %d bytes", typ, n, len(b))
		}
		if err := fn(typ, b[attrHeaderLen:n]); err != nil {
			return err
		}
		b = b[min((n+attrAlign-1)/attrAlign*attrAlign, len(b)):]
	}
	return nil
}

// count returns the number of attributes in b, up to the first malformed one.
func count(b []byte) (n int) {
	_ = Each(b, func(uint16, []byte) error {
		n++
		return nil
	})
	return n
}

func cString(b []byte) string {
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}

func bigUint32(b []byte) uint32 {
	if len(b) < 4 {
		return 0
	}
	return binary.BigEndian.Uint32(b)
}

func bigUint64(b []byte) uint64 {
	if len(b) < 8 {
		return 0
	}
	return binary.BigEndian.Uint64(b)
}

package nfnetlink

import (
	"encoding/binary"
	"fmt"
	"iter"

	"golang.org/x/sys/unix"
)

// Attrs is a run of netlink attributes (struct nlattr).
type Attrs []byte

const (
	attrHeaderLen = 4
	attrAlign     = 4
)

func (a *Attrs) header(typ uint16, n int) {
	*a = binary.NativeEndian.AppendUint16(*a, uint16(attrHeaderLen+n))
	*a = binary.NativeEndian.AppendUint16(*a, typ)
}

func (a *Attrs) pad() {
	for len(*a)%attrAlign != 0 {
		*a = append(*a, 0)
	}
}

// AddBytes appends an attribute.
func (a *Attrs) AddBytes(typ uint16, b []byte) {
	a.header(typ, len(b))
	*a = append(*a, b...)
	a.pad()
}

func (a *Attrs) str(typ uint16, s string) {
	a.header(typ, len(s)+1)
	*a = append(*a, s...)
	*a = append(*a, 0)
	a.pad()
}

// AddUint32 appends a number in network byte order, which nf_tables uses for all
// numbers.
func (a *Attrs) AddUint32(typ uint16, v uint32) {
	a.header(typ, 4)
	*a = binary.BigEndian.AppendUint32(*a, v)
}

func (a *Attrs) uint64(typ uint16, v uint64) {
	a.header(typ, 8)
	*a = binary.BigEndian.AppendUint64(*a, v)
}

// in returns the attributes of something in a table, whose name is the first attribute
// of every kind (NFTA_…_TABLE).
func in(table string, nameType uint16, name string) Attrs {
	var a Attrs
	a.str(unix.NFTA_CHAIN_TABLE, table)
	a.str(nameType, name)
	return a
}

// nest appends an attribute that contains what fill appends.
func (a *Attrs) nest(typ uint16, fill func()) {
	start := len(*a)
	a.header(typ|unix.NLA_F_NESTED, 0)
	fill()
	binary.NativeEndian.PutUint16((*a)[start:], uint16(len(*a)-start))
}

// Each calls fn for every attribute, with the type's flag bits cleared. The data alias
// b: Each is called for every element of a set and avoids the copies that the
// library's decoder makes.
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

// All returns the attributes up to the first malformed one.
func (a Attrs) All() iter.Seq2[uint16, Attrs] {
	return func(yield func(uint16, Attrs) bool) {
		_ = Each(a, func(typ uint16, data []byte) error {
			if !yield(typ, data) {
				return ErrEnough
			}
			return nil
		})
	}
}

// Attr returns the data of the last attribute of a type, or nil if there is none.
func (a Attrs) Attr(typ uint16) Attrs {
	var found Attrs
	for t, data := range a.All() {
		if t == typ {
			found = data
		}
	}
	return found
}

// Uint32 returns a number in network byte order, or 0 if there is none.
func (a Attrs) Uint32(typ uint16) uint32 { return uint32(a.Uint64(typ)) }

// Uint64 returns a number in network byte order, or 0 if there is none.
func (a Attrs) Uint64(typ uint16) uint64 { return Number(a.Attr(typ)) }

// Str returns a string up to its first zero byte.
func (a Attrs) Str(typ uint16) string { return unix.ByteSliceToString(a.Attr(typ)) }

// Value returns the bytes of an attribute that contains an nft_data value.
func (a Attrs) Value(typ uint16) []byte { return a.Attr(typ).Attr(unix.NFTA_DATA_VALUE) }

// Number returns a number in network byte order, of any number of bytes.
func Number(b []byte) (n uint64) {
	for _, c := range b {
		n = n<<8 | uint64(c)
	}
	return n
}

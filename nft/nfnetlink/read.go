package nfnetlink

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// dump requests all objects of a kind, which the error names, and parses each.
func dump[T any](c *Conn, kind string, family Family, msg uint16, a Attrs, parse func(Family, Attrs) T) ([]T, error) {
	list := []T{}
	err := c.walk(netlink.Dump, family, msg, a, func(f Family, b Attrs) error {
		list = append(list, parse(f, b))
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", kind, err)
	}
	return list, nil
}

// ErrEnough ends a list without an error, if it is returned for one of its objects.
var ErrEnough = errors.New("enough was read")

// walk requests an object or, with the flag Dump, all objects of a kind, and calls fn for each.
func (c *Conn) walk(flags netlink.HeaderFlags, family Family, msg uint16, a Attrs, fn func(Family, Attrs) error) error {
	err := c.Exchange(message(family, msg, flags, a), func(m netlink.Message) error {
		return fn(Family(m.Data[0]), m.Data[headerLen:])
	})
	if errors.Is(err, ErrEnough) {
		return nil
	}
	return err
}

func get[T any](c *Conn, family Family, msg uint16, a Attrs, parse func(Family, Attrs) T) (object T, err error) {
	err = c.walk(0, family, msg, a, func(f Family, b Attrs) error {
		object = parse(f, b)
		return nil
	})
	return object, err
}

// Table reads one table. If it does not exist, the error satisfies [IsNotExist].
func (c *Conn) Table(family Family, name string) (Table, error) {
	var a Attrs
	a.str(unix.NFTA_TABLE_NAME, name)
	return get(c, family, unix.NFT_MSG_GETTABLE, a, parseTable)
}

// SameTable returns [ErrReadAgain] if a table that was read is gone, or another one has its name: then what it
// contains has other handles.
func (c *Conn) SameTable(t Table) error {
	current, err := c.Table(t.Family, t.Name)
	if IsNotExist(err) || err == nil && current.Handle != t.Handle {
		return ErrReadAgain
	}
	return err
}

// Tables lists the tables of a family.
func (c *Conn) Tables(family Family) ([]Table, error) {
	return dump(c, "tables", family, unix.NFT_MSG_GETTABLE, nil, parseTable)
}

func parseTable(f Family, a Attrs) Table {
	return Table{
		Family: f, Name: a.Str(unix.NFTA_TABLE_NAME), Handle: a.Uint64(tableHandle),
		Flags: a.Uint32(unix.NFTA_TABLE_FLAGS), Use: a.Uint32(tableUse),
	}
}

// Chain reads one chain. If it does not exist, the error satisfies [IsNotExist].
func (c *Conn) Chain(family Family, table, chain string) (Chain, error) {
	a := in(table, unix.NFTA_CHAIN_NAME, chain)
	return get(c, family, unix.NFT_MSG_GETCHAIN, a, parseChain)
}

// EachChain calls do for each chain of a table, or of all tables of the family if it has no name. The kernel has no
// filter.
func (c *Conn) EachChain(family Family, table string, do func(Chain)) error {
	err := c.walk(netlink.Dump, family, unix.NFT_MSG_GETCHAIN, nil, func(f Family, b Attrs) error {
		name := b.Attr(unix.NFTA_CHAIN_TABLE)
		if table == "" || string(bytes.TrimRight(name, "\x00")) == table {
			do(parseChain(f, b))
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("list chains: %w", err)
	}
	return nil
}

func parseChain(f Family, a Attrs) Chain {
	const binding = 1 << 2 // NFT_CHAIN_BINDING, Linux 5.9
	c := Chain{
		Family: f, Table: a.Str(unix.NFTA_CHAIN_TABLE), Name: a.Str(unix.NFTA_CHAIN_NAME),
		Handle: a.Uint64(unix.NFTA_CHAIN_HANDLE), Use: a.Uint32(unix.NFTA_CHAIN_USE),
		Policy: a.Uint32(unix.NFTA_CHAIN_POLICY), Bound: a.Uint32(chainFlags)&binding != 0,
	}
	if h := a.Attr(unix.NFTA_CHAIN_HOOK); h != nil {
		c.Hook = &Hook{
			Type: a.Str(unix.NFTA_CHAIN_TYPE), Number: h.Uint32(unix.NFTA_HOOK_HOOKNUM),
			Priority: int32(h.Uint32(unix.NFTA_HOOK_PRIORITY)),
		}
	}
	return c
}

// EachRule lists the rules of a chain in order; of all chains in the table if chain
// is empty, and of all tables if table is empty too. A table or chain that does
// not exist has no rules. It stops at the first error of do.
//
// The list of one chain is right even if other programs' transactions interrupted
// it, unless they changed that chain: between two parts of a dump, the kernel only
// remembers how many rules of the chain it has listed (nf_tables_dump_rules).
func (c *Conn) EachRule(family Family, table, chain string, do func(Rule) error) error {
	var a Attrs
	if table != "" {
		a.str(unix.NFTA_RULE_TABLE, table)
	}
	if chain != "" {
		a.str(unix.NFTA_RULE_CHAIN, chain)
	}
	err := c.walk(netlink.Dump, family, unix.NFT_MSG_GETRULE, a, func(f Family, b Attrs) error {
		return do(ParseRule(f, b))
	})
	if err != nil && (chain == "" || !errors.Is(err, ErrReadAgain)) {
		return fmt.Errorf("list rules: %w", err)
	}
	return nil
}

// Rule reads one rule by its handle. If it does not exist, the error satisfies [IsNotExist].
func (c *Conn) Rule(family Family, table, chain string, handle uint64) (Rule, error) {
	a := in(table, unix.NFTA_RULE_CHAIN, chain)
	a.uint64(unix.NFTA_RULE_HANDLE, handle)
	return get(c, family, unix.NFT_MSG_GETRULE, a, ParseRule)
}

// ParseRule reads the attributes (NFTA_RULE_…) of a rule as the kernel lists it.
func ParseRule(f Family, a Attrs) Rule {
	r := Rule{
		Family: f, Table: a.Str(unix.NFTA_RULE_TABLE), Chain: a.Str(unix.NFTA_RULE_CHAIN),
		Handle: a.Uint64(unix.NFTA_RULE_HANDLE), UserData: a.Attr(unix.NFTA_RULE_USERDATA),
		Exprs: make([]Expr, 0, 8), // one array for most rules
	}
	for _, e := range a.Attr(unix.NFTA_RULE_EXPRESSIONS).All() {
		r.Exprs = append(r.Exprs, parseExpr(e))
	}
	return r
}

// Sets lists the sets of a table, or of all tables if it has no name, without their elements. If the
// table does not exist, the error satisfies [IsNotExist].
func (c *Conn) Sets(family Family, table string) ([]Set, error) {
	var a Attrs
	if table != "" {
		a.str(unix.NFTA_SET_TABLE, table)
	}
	return dump(c, "sets", family, unix.NFT_MSG_GETSET, a, parseSet)
}

func parseSet(f Family, a Attrs) Set {
	s := Set{
		Family: f, Table: a.Str(unix.NFTA_SET_TABLE), Name: a.Str(unix.NFTA_SET_NAME), Handle: a.Uint64(setHandle),
		Flags: a.Uint32(unix.NFTA_SET_FLAGS), UserData: a.Attr(unix.NFTA_SET_USERDATA),
		KeyType: a.Uint32(unix.NFTA_SET_KEY_TYPE), KeyLen: a.Uint32(unix.NFTA_SET_KEY_LEN),
		DataType: a.Uint32(unix.NFTA_SET_DATA_TYPE), DataLen: a.Uint32(unix.NFTA_SET_DATA_LEN),
		// of a concatenation, the description also has the lengths of the fields
		Size:  a.Attr(unix.NFTA_SET_DESC).Uint32(unix.NFTA_SET_DESC_SIZE),
		Count: a.Uint32(setCount),
	}
	for typ := range a.All() {
		switch typ {
		case setCount:
			s.Counted = true
		case unix.NFTA_SET_OBJ_TYPE, unix.NFTA_SET_TIMEOUT,
			unix.NFTA_SET_GC_INTERVAL, unix.NFTA_SET_POLICY, setExpr, setExpressions:
			s.Special = append(s.Special, typ)
		}
	}
	return s
}

// EachElement calls do for each element of a set or map, and for each bound of an interval
// set. The kernel does not report if a transaction interrupted such a dump: compare the
// generation before and after, and act on a difference only if a second read confirms it.
func (c *Conn) EachElement(family Family, table, set string, do func(Element) error) error {
	a := in(table, unix.NFTA_SET_ELEM_LIST_SET, set)
	err := c.walk(netlink.Dump, family, unix.NFT_MSG_GETSETELEM, a, func(_ Family, b Attrs) error {
		return parseElements(b, do)
	})
	if err != nil {
		return fmt.Errorf("list elements of %s: %w", Quote(set), err)
	}
	return nil
}

// An Element is an element of a set or a map.
type Element struct {
	Key   []byte // the components of a concatenation are padded to 4 bytes each
	Last  []byte // the end of an interval of a concatenation; nil: the element is one key
	End   bool   // the key is the first address after an interval
	Value []byte // what a map has for the key, unless it is a verdict map
	Code  int32  // the verdict of a verdict map
	Chain string // the target of a jump or goto
	// Conditional means that the element has a timeout, other state, or the end of an interval of a concatenation.
	Conditional bool
}

func parseElements(b Attrs, fn func(Element) error) error {
	for _, e := range b.Attr(unix.NFTA_SET_ELEM_LIST_ELEMENTS).All() {
		if err := fn(parseElement(e)); err != nil {
			return err
		}
	}
	return nil
}

func parseElement(b Attrs) (e Element) {
	for typ, data := range b.All() {
		switch typ {
		case unix.NFTA_SET_ELEM_KEY:
			e.Key = data.Attr(unix.NFTA_DATA_VALUE)
		case unix.NFTA_SET_ELEM_FLAGS:
			e.End = Number(data)&unix.NFT_SET_ELEM_INTERVAL_END != 0
		case unix.NFTA_SET_ELEM_DATA:
			e.Value = data.Attr(unix.NFTA_DATA_VALUE)
			e.Code, e.Chain, _ = parseVerdict(data)
		case unix.NFTA_SET_ELEM_EXPR, elemExpressions, unix.NFTA_SET_ELEM_TIMEOUT, unix.NFTA_SET_ELEM_EXPIRATION,
			unix.NFTA_SET_ELEM_OBJREF:
			e.Conditional = true
		case elemKeyEnd:
			e.Conditional = true
			e.Last = data.Attr(unix.NFTA_DATA_VALUE)
		}
	}
	return e
}

// Objects lists the stateful objects of a table. If the table does not exist, the list is empty, or the error satisfies
// [IsNotExist].
func (c *Conn) Objects(family Family, table string) ([]Object, error) {
	var a Attrs
	a.str(unix.NFTA_OBJ_TABLE, table)
	return dump(c, "counters", family, unix.NFT_MSG_GETOBJ, a, parseObject)
}

func parseObject(f Family, a Attrs) Object {
	data := a.Attr(unix.NFTA_OBJ_DATA)
	return Object{
		Family: f, Table: a.Str(unix.NFTA_OBJ_TABLE), Name: a.Str(unix.NFTA_OBJ_NAME), Type: a.Uint32(unix.NFTA_OBJ_TYPE),
		Packets: data.Uint64(unix.NFTA_COUNTER_PACKETS),
	}
}

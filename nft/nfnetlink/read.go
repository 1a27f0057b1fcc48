package nfnetlink

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/iprange"
)

// dump requests all objects of a kind and parses each.
func dump[T any](c *Conn, family Family, msg uint16, a attrs, parse func(Family, []byte) (T, error)) ([]T, error) {
	out := []T{}
	err := dumpEach(c, family, msg, a, func(f Family, b []byte) error {
		v, err := parse(f, b)
		out = append(out, v)
		return err
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

// dumpEach requests all objects of a kind and calls fn for each, until fn fails.
func dumpEach(c *Conn, family Family, msg uint16, a attrs, fn func(Family, []byte) error) error {
	return c.stream(message(family, msg, netlink.Dump, a), func(m netlink.Message) error {
		if len(m.Data) < 4 {
			return fmt.Errorf("message of %d bytes", len(m.Data))
		}
		return fn(Family(m.Data[0]), m.Data[4:])
	})
}

// errEnough ends a dump early.
var errEnough = errors.New("enough was read")

// get requests one object.
func get[T any](c *Conn, family Family, msg uint16, a attrs, parse func(Family, []byte) (T, error)) (T, error) {
	var zero T
	msgs, err := c.request(message(family, msg, 0, a))
	if err != nil {
		return zero, err
	}
	if len(msgs) != 1 || len(msgs[0].Data) < 4 {
		return zero, fmt.Errorf("reply of %d messages", len(msgs))
	}
	return parse(Family(msgs[0].Data[0]), msgs[0].Data[4:])
}

// Table reads one table. If it does not exist, the error satisfies [IsNotExist].
func (c *Conn) Table(family Family, name string) (Table, error) {
	var a attrs
	a.str(unix.NFTA_TABLE_NAME, name)
	return get(c, family, unix.NFT_MSG_GETTABLE, a, parseTable)
}

// Tables lists the tables of a family.
func (c *Conn) Tables(family Family) ([]Table, error) {
	ts, err := dump(c, family, unix.NFT_MSG_GETTABLE, nil, parseTable)
	if err != nil {
		return nil, fmt.Errorf("list tables: %w", err)
	}
	return ts, nil
}

func parseTable(f Family, b []byte) (Table, error) {
	t := Table{Family: f}
	err := Each(b, func(typ uint16, data []byte) error {
		switch typ {
		case unix.NFTA_TABLE_NAME:
			t.Name = cString(data)
		case unix.NFTA_TABLE_FLAGS:
			t.Flags = bigUint32(data)
		case tableUse:
			t.Use = bigUint32(data)
		case tableHandle:
			t.Handle = bigUint64(data)
		}
		return nil
	})
	return t, err
}

// Chain reads one chain. If it does not exist, the error satisfies [IsNotExist].
func (c *Conn) Chain(family Family, table, chain string) (Chain, error) {
	a := in(table, unix.NFTA_CHAIN_NAME, chain)
	return get(c, family, unix.NFT_MSG_GETCHAIN, a, parseChain)
}

// Chains lists the chains of a family in all tables, because the kernel has no
// filter.
func (c *Conn) Chains(family Family) ([]Chain, error) {
	cs, err := dump(c, family, unix.NFT_MSG_GETCHAIN, nil, parseChain)
	if err != nil {
		return nil, fmt.Errorf("list chains: %w", err)
	}
	return cs, nil
}

func parseChain(f Family, b []byte) (Chain, error) {
	c := Chain{Family: f}
	typ := ""
	err := Each(b, func(t uint16, data []byte) error {
		switch t {
		case unix.NFTA_CHAIN_TABLE:
			c.Table = cString(data)
		case unix.NFTA_CHAIN_NAME:
			c.Name = cString(data)
		case unix.NFTA_CHAIN_POLICY:
			c.Policy = bigUint32(data)
		case unix.NFTA_CHAIN_TYPE:
			typ = cString(data)
		case unix.NFTA_CHAIN_HANDLE:
			c.Handle = bigUint64(data)
		case unix.NFTA_CHAIN_USE:
			c.Use = bigUint32(data)
		case chainFlags:
			const binding = 1 << 2 // NFT_CHAIN_BINDING, Linux 5.9
			c.Bound = bigUint32(data)&binding != 0
		case unix.NFTA_CHAIN_HOOK:
			c.Hook = &Hook{}
			return Each(data, func(t uint16, data []byte) error {
				switch t {
				case unix.NFTA_HOOK_HOOKNUM:
					c.Hook.Number = bigUint32(data)
				case unix.NFTA_HOOK_PRIORITY:
					c.Hook.Priority = int32(bigUint32(data))
				}
				return nil
			})
		}
		return nil
	})
	if c.Hook != nil {
		c.Hook.Type = typ
	}
	return c, err
}

// FirstRules lists rules like [Conn.EachRule], up to the first for which enough
// returns true; more reports whether there was one.
func (c *Conn) FirstRules(family Family, table, chain string, enough func(Rule) bool) (rules []Rule, more bool, err error) {
	err = c.EachRule(family, table, chain, func(r Rule) error {
		if enough(r) {
			return errEnough
		}
		rules = append(rules, r)
		return nil
	})
	if errors.Is(err, errEnough) {
		return rules, true, nil
	}
	return rules, false, err
}

// EachRule lists the rules of a chain in order; of all chains in the table if chain
// is empty, and of all tables if table is empty too. A table or chain that does
// not exist has no rules. It stops at the first error of do.
//
// The list of one chain is right even if other programs' transactions interrupted
// it, unless they changed that chain: between two parts of a dump, the kernel only
// remembers how many rules of the chain it has listed (nf_tables_dump_rules).
func (c *Conn) EachRule(family Family, table, chain string, do func(Rule) error) error {
	var a attrs
	if table != "" {
		a.str(unix.NFTA_RULE_TABLE, table)
	}
	if chain != "" {
		a.str(unix.NFTA_RULE_CHAIN, chain)
	}
	err := dumpEach(c, family, unix.NFT_MSG_GETRULE, a, func(f Family, b []byte) error {
		r, err := ParseRule(f, b)
		if err != nil {
			return err
		}
		return do(r)
	})
	if err != nil && (chain == "" || !errors.Is(err, ErrInterrupted)) {
		return fmt.Errorf("list rules: %w", err)
	}
	return nil
}

// ParseRule reads the attributes (NFTA_RULE_…) of a rule as the kernel lists it.
func ParseRule(f Family, b []byte) (Rule, error) {
	r := Rule{Family: f}
	err := Each(b, func(typ uint16, data []byte) error {
		switch typ {
		case unix.NFTA_RULE_TABLE:
			r.Table = cString(data)
		case unix.NFTA_RULE_CHAIN:
			r.Chain = cString(data)
		case unix.NFTA_RULE_HANDLE:
			r.Handle = bigUint64(data)
		case unix.NFTA_RULE_USERDATA:
			r.UserData = data
		case unix.NFTA_RULE_EXPRESSIONS:
			r.Exprs = make([]Expr, 0, count(data))
			return Each(data, func(_ uint16, data []byte) error {
				e, err := parseExpr(data)
				r.Exprs = append(r.Exprs, e)
				return err
			})
		}
		return nil
	})
	return r, err
}

// Sets lists the sets of a table, without their elements. If the table does not
// exist, the error satisfies [IsNotExist].
func (c *Conn) Sets(family Family, table string) ([]Set, error) {
	var a attrs
	a.str(unix.NFTA_SET_TABLE, table)
	ss, err := dump(c, family, unix.NFT_MSG_GETSET, a, parseSet)
	if err != nil {
		return nil, fmt.Errorf("list sets: %w", err)
	}
	return ss, nil
}

func parseSet(f Family, b []byte) (Set, error) {
	s := Set{Family: f}
	err := Each(b, func(typ uint16, data []byte) error {
		switch typ {
		case unix.NFTA_SET_TABLE:
			s.Table = cString(data)
		case unix.NFTA_SET_NAME:
			s.Name = cString(data)
		case unix.NFTA_SET_FLAGS:
			s.Flags = bigUint32(data)
		case unix.NFTA_SET_KEY_TYPE:
			s.KeyType = bigUint32(data)
		case unix.NFTA_SET_KEY_LEN:
			s.KeyLen = bigUint32(data)
		case unix.NFTA_SET_DATA_TYPE:
			s.DataType = bigUint32(data)
		case unix.NFTA_SET_DATA_LEN:
			s.DataLen = bigUint32(data)
		case unix.NFTA_SET_USERDATA:
			s.UserData = data
		case unix.NFTA_SET_DESC: // of a concatenation it also has the lengths of the fields
			return Each(data, func(typ uint16, data []byte) error {
				if typ == unix.NFTA_SET_DESC_SIZE {
					s.Size = bigUint32(data)
				}
				return nil
			})
		case unix.NFTA_SET_OBJ_TYPE, unix.NFTA_SET_TIMEOUT,
			unix.NFTA_SET_GC_INTERVAL, unix.NFTA_SET_POLICY, setExpr, setExpressions:
			s.Special = append(s.Special, typ)
		case setHandle:
			s.Handle = bigUint64(data)
		case setCount:
			s.Count, s.Counted = bigUint32(data), true
		}
		return nil
	})
	return s, err
}

// Contents is the content of an interval set of addresses.
type Contents struct {
	Ranges []iprange.Range
	// Conditional counts the elements that do more than match: those with a
	// limit, a quota, a timeout or other state, or with data.
	Conditional int
	// More reports that reading stopped at the limit.
	More bool
}

// Contents reads an interval set of addresses, up to a limit of intervals. The kernel
// does not report if a transaction interrupted such a dump: compare the generation
// before and after, and act on a difference only if a second read confirms it.
func (c *Conn) Contents(set Set, limit int) (Contents, error) {
	a := in(set.Table, unix.NFTA_SET_ELEM_LIST_SET, set.Name)
	var out Contents
	bounds := make([]iprange.Bound, 0, 2*min(int(set.Count), limit)+1)
	starts := 0
	err := dumpEach(c, set.Family, unix.NFT_MSG_GETSETELEM, a, func(_ Family, b []byte) error {
		err := eachElement(b, func(e element) {
			// nft adds an extra bound before the first interval.
			if !e.End || !e.Addr.IsUnspecified() {
				bounds = append(bounds, e.Bound)
			}
			if !e.End {
				starts++
			}
			if e.Conditional {
				out.Conditional++
			}
		})
		if starts > limit {
			return errEnough
		}
		return err
	})
	if err != nil && !errors.Is(err, errEnough) {
		return Contents{}, fmt.Errorf("list elements of %s: %w", Printable(set.Name), err)
	}
	out.Ranges, out.More = iprange.Pair(bounds), err != nil
	return out, nil
}

// HasElement reports whether a set has an element for the address, and whether that
// one is limited: it may not match, because of a limit or a quota. The zero address
// stands for the catch-all element * (Linux 5.13), which no count includes. The lookup
// is as cheap as reading the generation, however large the set is.
func (c *Conn) HasElement(family Family, table, set string, addr netip.Addr) (has, limited bool, err error) {
	const catchAll = 2 // NFT_SET_ELEM_CATCHALL
	a := in(table, unix.NFTA_SET_ELEM_LIST_SET, set)
	a.nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func() {
		if addr.IsValid() {
			a.element(addr, false)
			return
		}
		a.nest(unix.NFTA_LIST_ELEM, func() { a.uint32(unix.NFTA_SET_ELEM_FLAGS, catchAll) })
	})
	replies, err := c.request(message(family, unix.NFT_MSG_GETSETELEM, 0, a))
	switch {
	case IsNotExist(err), !addr.IsValid() && errors.Is(err, unix.EINVAL):
		return false, false, nil
	case err != nil:
		return false, false, fmt.Errorf("look up %s in %s: %w", addr, Printable(set), err)
	}
	for _, m := range replies {
		if err := eachElement(m.Data[4:], func(e element) { limited = limited || e.Limited }); err != nil {
			return false, false, fmt.Errorf("look up %s in %s: %w", addr, Printable(set), err)
		}
	}
	return true, limited, nil
}

// An element is a bound of a set.
type element struct {
	iprange.Bound
	Conditions
}

// Conditions are what an element of a set or a map does besides matching.
type Conditions struct {
	// Conditional means that it has a timeout or other state; Limited, that because
	// of that it may not match although it has not expired.
	Conditional, Limited bool
}

// add adds what an attribute of the element means.
func (c *Conditions) add(typ uint16, data []byte) {
	switch typ {
	case unix.NFTA_SET_ELEM_EXPR, elemExpressions:
		c.Conditional, c.Limited = true, c.Limited || limit(expressions(typ == elemExpressions, data))
	case unix.NFTA_SET_ELEM_TIMEOUT, unix.NFTA_SET_ELEM_EXPIRATION, unix.NFTA_SET_ELEM_OBJREF, elemKeyEnd:
		c.Conditional = true
	}
}

func eachElement(b []byte, fn func(element)) error {
	return Each(b, func(typ uint16, data []byte) error {
		if typ != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
			return nil
		}
		return Each(data, func(_ uint16, data []byte) error {
			e, err := parseElement(data)
			if err == nil {
				fn(e)
			}
			return err
		})
	})
}

func parseElement(b []byte) (element, error) {
	var e element
	err := Each(b, func(typ uint16, data []byte) error {
		switch typ {
		case unix.NFTA_SET_ELEM_KEY: // the catch-all element * has none
			return Each(data, func(typ uint16, data []byte) error {
				if typ == unix.NFTA_DATA_VALUE {
					e.Addr, _ = netip.AddrFromSlice(data)
				}
				return nil
			})
		case unix.NFTA_SET_ELEM_FLAGS:
			e.End = bigUint32(data)&unix.NFT_SET_ELEM_INTERVAL_END != 0
		case unix.NFTA_SET_ELEM_DATA:
			e.Conditional = true
		default:
			e.add(typ, data)
		}
		return nil
	})
	return e, err
}

// expressions names the expressions of a set or an element: one, or a list.
func expressions(list bool, b []byte) (names []string) {
	one := func(b []byte) error {
		return Each(b, func(typ uint16, b []byte) error {
			if typ == unix.NFTA_EXPR_NAME {
				names = append(names, cString(b))
			}
			return nil
		})
	}
	each := one
	if list {
		each = func(b []byte) error { return Each(b, func(_ uint16, b []byte) error { return one(b) }) }
	}
	if err := each(b); err != nil {
		return append(names, "") // of an unknown name
	}
	return names
}

// limit reports whether expressions can keep an element from matching: all but
// counters.
func limit(names []string) bool {
	return slices.ContainsFunc(names, func(name string) bool { return name != "counter" })
}

// A MapElement is an element of a map.
type MapElement struct {
	Key   []byte // the components of a concatenation are padded to 4 bytes each
	Value []byte // unless it is a verdict map
	Code  int32  // the verdict
	Chain string // of a jump or goto
	End   bool   // it is the bound after an interval
	Conditions
}

// MapElements reads up to limit elements of a map; more reports that there are
// others. An interval map is read bound by bound. Interrupted dumps are handled
// as for [Conn.Contents].
func (c *Conn) MapElements(family Family, table, set string, limit int) (elements []MapElement, more bool, err error) {
	a := in(table, unix.NFTA_SET_ELEM_LIST_SET, set)
	err = dumpEach(c, family, unix.NFT_MSG_GETSETELEM, a, func(_ Family, b []byte) error {
		return Each(b, func(typ uint16, data []byte) error {
			if typ != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
				return nil
			}
			return Each(data, func(_ uint16, data []byte) error {
				if len(elements) == limit {
					return errEnough
				}
				e, err := parseMapElement(data)
				elements = append(elements, e)
				return err
			})
		})
	})
	if errors.Is(err, errEnough) {
		return elements, true, nil
	}
	if err != nil {
		return nil, false, fmt.Errorf("list elements of %s: %w", Printable(set), err)
	}
	return elements, false, nil
}

func parseMapElement(b []byte) (MapElement, error) {
	var e MapElement
	err := Each(b, func(typ uint16, data []byte) error {
		switch typ {
		case unix.NFTA_SET_ELEM_KEY:
			return Each(data, func(_ uint16, data []byte) error {
				e.Key = data
				return nil
			})
		case unix.NFTA_SET_ELEM_FLAGS:
			e.End = bigUint32(data)&unix.NFT_SET_ELEM_INTERVAL_END != 0
		case unix.NFTA_SET_ELEM_DATA:
			e.Code, e.Chain, _ = parseVerdict(data)
			e.Value = valueOf(data)
		default:
			e.add(typ, data)
		}
		return nil
	})
	return e, err
}

// Objects lists the stateful objects of a table. A table that does not exist has
// none.
func (c *Conn) Objects(family Family, table string) ([]Object, error) {
	var a attrs
	a.str(unix.NFTA_OBJ_TABLE, table)
	os, err := dump(c, family, unix.NFT_MSG_GETOBJ, a, parseObject)
	if err != nil {
		return nil, fmt.Errorf("list counters: %w", err)
	}
	return os, nil
}

func parseObject(f Family, b []byte) (Object, error) {
	o := Object{Family: f}
	err := Each(b, func(typ uint16, data []byte) error {
		switch typ {
		case unix.NFTA_OBJ_TABLE:
			o.Table = cString(data)
		case unix.NFTA_OBJ_NAME:
			o.Name = cString(data)
		case unix.NFTA_OBJ_TYPE:
			o.Type = bigUint32(data)
		case unix.NFTA_OBJ_DATA:
			return Each(data, func(typ uint16, data []byte) error {
				switch typ {
				case unix.NFTA_COUNTER_PACKETS:
					o.Packets = bigUint64(data)
				case unix.NFTA_COUNTER_BYTES:
					o.Bytes = bigUint64(data)
				}
				return nil
			})
		}
		return nil
	})
	return o, err
}

// A Generation is what the kernel reports about a transaction.
type Generation struct {
	ID uint32
	// Process is the command name of the thread that committed it, at most 15
	// bytes, made [Printable]. NFTA_GEN_PROC_PID is omitted: it is a thread ID,
	// which is not a PID in a program with several threads.
	Process string
}

func parseGen(m netlink.Message) (Generation, bool) {
	if m.Header.Type != netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWGEN) || len(m.Data) < 4 {
		return Generation{}, false
	}
	var g Generation
	err := Each(m.Data[4:], func(typ uint16, data []byte) error {
		switch typ {
		case unix.NFTA_GEN_ID:
			g.ID = bigUint32(data)
		case unix.NFTA_GEN_PROC_NAME:
			g.Process = Printable(cString(data))
		}
		return nil
	})
	return g, err == nil
}

package nfnetlink

import (
	"fmt"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/iprange"
)

// A Reader reads the ruleset, as a [Conn] does.
type Reader interface {
	Generation() (uint32, error)
	Table(family Family, name string) (Table, error)
	Tables(family Family) ([]Table, error)
	Chain(family Family, table, chain string) (Chain, error)
	Chains(family Family) ([]Chain, error)
	Rules(family Family, table, chain string) ([]Rule, error)
	Rule(family Family, table, chain string, handle uint64) (Rule, error)
	Sets(family Family, table string) ([]Set, error)
	Elements(family Family, table, set string) ([]iprange.Range, error)
	Objects(family Family, table string) ([]Object, error)
}

// dump asks for all objects of a kind and parses each.
func dump[T any](c *Conn, family Family, msg uint16, a attrs, parse func(Family, []byte) (T, error)) ([]T, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	msgs, err := c.request(message(family, msg, netlink.Dump, a))
	if err != nil {
		return nil, err
	}
	out := make([]T, 0, len(msgs))
	for _, m := range msgs {
		if len(m.Data) < 4 {
			return nil, fmt.Errorf("message of %d bytes", len(m.Data))
		}
		v, err := parse(Family(m.Data[0]), m.Data[4:])
		if err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	return out, nil
}

// get asks for one object.
func get[T any](c *Conn, family Family, msg uint16, a attrs, parse func(Family, []byte) (T, error)) (T, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var zero T
	msgs, err := c.request(message(family, msg, 0, a))
	if err != nil {
		return zero, err
	}
	if len(msgs) != 1 || len(msgs[0].Data) < 4 {
		return zero, fmt.Errorf("answer of %d messages", len(msgs))
	}
	return parse(Family(msgs[0].Data[0]), msgs[0].Data[4:])
}

// Table reads one table. One that is not there gives an error that [IsNotExist].
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
		}
		return nil
	})
	return t, err
}

// Chain reads one chain. One that is not there gives an error that [IsNotExist].
func (c *Conn) Chain(family Family, table, chain string) (Chain, error) {
	var a attrs
	a.str(unix.NFTA_CHAIN_TABLE, table)
	a.str(unix.NFTA_CHAIN_NAME, chain)
	return get(c, family, unix.NFT_MSG_GETCHAIN, a, parseChain)
}

// Chains lists the chains of a family, of all tables: the kernel has no filter.
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

// Rules lists the rules of a chain, in order; of all chains of the table where
// chain is empty, of all tables where table is empty too. A table or chain that
// is not there has none.
func (c *Conn) Rules(family Family, table, chain string) ([]Rule, error) {
	var a attrs
	if table != "" {
		a.str(unix.NFTA_RULE_TABLE, table)
	}
	if chain != "" {
		a.str(unix.NFTA_RULE_CHAIN, chain)
	}
	rs, err := dump(c, family, unix.NFT_MSG_GETRULE, a, parseRule)
	if err != nil {
		return nil, fmt.Errorf("list rules: %w", err)
	}
	return rs, nil
}

// Rule reads one rule. One that is not there gives an error that [IsNotExist].
func (c *Conn) Rule(family Family, table, chain string, handle uint64) (Rule, error) {
	var a attrs
	a.str(unix.NFTA_RULE_TABLE, table)
	a.str(unix.NFTA_RULE_CHAIN, chain)
	a.uint64(unix.NFTA_RULE_HANDLE, handle)
	return get(c, family, unix.NFT_MSG_GETRULE, a, parseRule)
}

func parseRule(f Family, b []byte) (Rule, error) {
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

// Sets lists the sets of a table, without their elements. A table that is not
// there gives an error that [IsNotExist].
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
		case unix.NFTA_SET_USERDATA:
			s.UserData = data
		case setHandle:
			s.Handle = bigUint64(data)
		case setCount:
			s.Count, s.Counted = bigUint32(data), true
		}
		return nil
	})
	return s, err
}

// Elements reads an interval set of addresses. The kernel does not tell when
// such a dump was torn by a transaction: compare the generation before and
// after, and act on a difference only when a second read agrees.
func (c *Conn) Elements(family Family, table, set string) ([]iprange.Range, error) {
	var a attrs
	a.str(unix.NFTA_SET_ELEM_LIST_TABLE, table)
	a.str(unix.NFTA_SET_ELEM_LIST_SET, set)
	parts, err := dump(c, family, unix.NFT_MSG_GETSETELEM, a, parseElements)
	if err != nil {
		return nil, fmt.Errorf("list elements of %s: %w", Printable(set), err)
	}
	var all []iprange.Bound
	for _, p := range parts {
		all = append(all, p...)
	}
	return iprange.Pair(all), nil
}

func parseElements(_ Family, b []byte) ([]iprange.Bound, error) {
	var out []iprange.Bound
	err := Each(b, func(typ uint16, data []byte) error {
		if typ != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
			return nil
		}
		return Each(data, func(_ uint16, data []byte) error {
			p, err := parseBound(data)
			// nft puts a bound of its own before the first interval.
			if !p.End || !p.Addr.IsUnspecified() {
				out = append(out, p)
			}
			return err
		})
	})
	return out, err
}

func parseBound(b []byte) (iprange.Bound, error) {
	var p iprange.Bound
	err := Each(b, func(typ uint16, data []byte) error {
		switch typ {
		case unix.NFTA_SET_ELEM_KEY: // the element * has none
			return Each(data, func(typ uint16, data []byte) error {
				if typ == unix.NFTA_DATA_VALUE {
					p.Addr, _ = netip.AddrFromSlice(data)
				}
				return nil
			})
		case unix.NFTA_SET_ELEM_FLAGS:
			p.End = bigUint32(data)&unix.NFT_SET_ELEM_INTERVAL_END != 0
		}
		return nil
	})
	return p, err
}

// Objects lists the stateful objects of a table. A table that is not there has
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

// Flowtables lists the flowtables of a table.
func (c *Conn) Flowtables(family Family, table string) ([]Flowtable, error) {
	var a attrs
	a.str(flowtableTable, table)
	fs, err := dump(c, family, unix.NFT_MSG_GETFLOWTABLE, a, func(f Family, b []byte) (Flowtable, error) {
		ft := Flowtable{Family: f}
		err := Each(b, func(typ uint16, data []byte) error {
			switch typ {
			case flowtableTable:
				ft.Table = cString(data)
			case flowtableName:
				ft.Name = cString(data)
			}
			return nil
		})
		return ft, err
	})
	if err != nil {
		return nil, fmt.Errorf("list flowtables: %w", err)
	}
	return fs, nil
}

// A Generation is what the kernel says of a transaction.
type Generation struct {
	ID uint32
	// Process is the command name of the thread that made it, at most 15
	// bytes, as [Printable] has it. The pid that the kernel names beside it is a thread's.
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

package nfnetlink

import (
	"net/netip"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// A Batch is a transaction under construction. The zero value is empty.
type Batch struct {
	msgs []netlink.Message
	// Elements is how many elements the batch adds to sets and maps.
	Elements int
	// Handles maps the name of each table and set that the batch created to its
	// handle, once the batch is committed. One that is created again under the same name
	// has another.
	Handles map[string]uint64
	// Generation is the one that the kernel reports right after the batch was committed.
	Generation    uint32
	deleted       map[ruleID]bool // what the batch has deleted: it does not do so again
	preconditions []Precondition  // see [Batch.Require]
}

// A ruleID names a rule, or with handle 0 a chain.
type ruleID struct {
	ChainID
	handle uint64
}

// Len returns the number of messages.
func (b *Batch) Len() int { return len(b.msgs) }

// Changes reports whether the batch surely changes something: a transaction that changes nothing does not raise the
// generation. What the batch creates may exist by then, unless it is a rule or an element, and a chain that is flushed
// (NFT_MSG_DELRULE) may be empty.
func (b *Batch) Changes() bool {
	for _, m := range b.msgs {
		switch uint16(m.Header.Type & 0xff) {
		case unix.NFT_MSG_NEWRULE, unix.NFT_MSG_NEWSETELEM,
			unix.NFT_MSG_DELTABLE, unix.NFT_MSG_DELCHAIN, unix.NFT_MSG_DELSET, unix.NFT_MSG_DELOBJ:
			return true
		}
	}
	return false
}

func (b *Batch) add(family Family, msg uint16, flags netlink.HeaderFlags, a Attrs) {
	b.msgs = append(b.msgs, message(family, msg, flags, a))
}

func message(family Family, msg uint16, flags netlink.HeaderFlags, a Attrs) netlink.Message {
	return Request(unix.NFNL_SUBSYS_NFTABLES<<8|msg, family, flags, a)
}

// headerLen is the size of struct nfgenmsg.
const headerLen = 4

// Request returns a message to a subsystem of netfilter, NFNL_SUBSYS_…<<8 | message.
func Request(typ uint16, family Family, flags netlink.HeaderFlags, a Attrs) netlink.Message {
	return netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(typ), Flags: netlink.Request | flags},
		Data:   append([]byte{byte(family), unix.NFNETLINK_V0, 0, 0}, a...),
	}
}

// AddTable creates a table, or clears the flags of an existing one, which wakes a
// dormant table.
func (b *Batch) AddTable(family Family, table string) {
	b.addTable(Table{Family: family, Name: table})
}

// WakeTable clears the flag dormant of an existing table. The kernel rejects
// changes of the flag persist.
func (b *Batch) WakeTable(t Table) {
	t.Flags &^= unix.NFT_TABLE_F_DORMANT
	b.addTable(t)
}

func (b *Batch) addTable(t Table) {
	var a Attrs
	a.str(unix.NFTA_TABLE_NAME, t.Name)
	a.AddUint32(unix.NFTA_TABLE_FLAGS, t.Flags)
	b.add(t.Family, unix.NFT_MSG_NEWTABLE, netlink.Create|netlink.Echo, a)
}

// DelTable deletes a table and everything in it.
func (b *Batch) DelTable(family Family, table string) {
	var a Attrs
	a.str(unix.NFTA_TABLE_NAME, table)
	b.add(family, unix.NFT_MSG_DELTABLE, 0, a)
}

// DelEmptyTable deletes a table in which nothing is left. Otherwise the kernel rejects the transaction.
func (b *Batch) DelEmptyTable(t Table) {
	var a Attrs
	a.str(unix.NFTA_TABLE_NAME, t.Name)
	b.add(t.Family, unix.NFT_MSG_DELTABLE, unix.NLM_F_NONREC, a)
}

// A Precondition is what a batch relies on, such as that a handle is still that of the rule that was read.
type Precondition interface {
	// Check returns [ErrReadAgain] if the precondition does not hold any more.
	Check(c *Conn) error
}

// Require adds a precondition. [Conn.Commit] checks all of them just before it sends the batch, and the kernel rejects
// the batch if anybody commits in between.
func (b *Batch) Require(x Precondition) { b.preconditions = append(b.preconditions, x) }

// AddChain creates a chain. An existing chain of that name must have the same
// hook; its policy is updated.
func (b *Batch) AddChain(c Chain) {
	a := in(c.Table, unix.NFTA_CHAIN_NAME, c.Name)
	if c.Hook != nil {
		a.nest(unix.NFTA_CHAIN_HOOK, func() {
			a.AddUint32(unix.NFTA_HOOK_HOOKNUM, c.Hook.Number)
			a.AddUint32(unix.NFTA_HOOK_PRIORITY, uint32(c.Hook.Priority))
		})
		a.AddUint32(unix.NFTA_CHAIN_POLICY, c.Policy)
		a.str(unix.NFTA_CHAIN_TYPE, c.Hook.Type)
	}
	b.add(c.Family, unix.NFT_MSG_NEWCHAIN, netlink.Create, a)
	delete(b.deleted, ruleID{c.ID(), 0})
}

// DelChain deletes a chain; a second call for it does nothing. If the chain has rules then, or something refers to it,
// the kernel rejects the transaction. If it has a hook, the kernel drops all packets in the queues (nfqueue) of the
// network namespace.
func (b *Batch) DelChain(c ChainID) {
	if b.markDeleted(ruleID{c, 0}) {
		b.add(c.Family, unix.NFT_MSG_DELCHAIN, unix.NLM_F_NONREC, in(c.Table, unix.NFTA_CHAIN_NAME, c.Name))
	}
}

// markDeleted records a deletion, and returns false if the batch already has it.
func (b *Batch) markDeleted(id ruleID) bool {
	if b.deleted[id] {
		return false
	}
	if b.deleted == nil {
		b.deleted = map[ruleID]bool{}
	}
	b.deleted[id] = true
	return true
}

// AddRule appends a rule to its chain.
func (b *Batch) AddRule(r Rule) {
	b.add(r.Family, unix.NFT_MSG_NEWRULE, netlink.Create|netlink.Append, ruleAttrs(r))
}

func ruleAttrs(r Rule) Attrs {
	a := in(r.Table, unix.NFTA_RULE_CHAIN, r.Chain)
	a.nest(unix.NFTA_RULE_EXPRESSIONS, func() {
		for _, e := range r.Exprs {
			a.nest(unix.NFTA_LIST_ELEM, func() {
				a.str(unix.NFTA_EXPR_NAME, e.Name)
				a.AddBytes(unix.NFTA_EXPR_DATA|unix.NLA_F_NESTED, e.Attrs)
			})
		}
	})
	if len(r.UserData) > 0 {
		a.AddBytes(unix.NFTA_RULE_USERDATA, r.UserData)
	}
	return a
}

// DelRule deletes the rule with the same handle; a second call for it does nothing.
func (b *Batch) DelRule(r Rule) {
	if !b.markDeleted(ruleID{ChainID{Family: r.Family, Table: r.Table, Name: r.Chain}, r.Handle}) {
		return
	}
	a := in(r.Table, unix.NFTA_RULE_CHAIN, r.Chain)
	a.uint64(unix.NFTA_RULE_HANDLE, r.Handle)
	b.add(r.Family, unix.NFT_MSG_DELRULE, 0, a)
}

// FlushChain deletes all rules of a chain, unless the batch deletes the chain itself before.
func (b *Batch) FlushChain(c ChainID) {
	if b.deleted[ruleID{c, 0}] {
		return
	}
	b.add(c.Family, unix.NFT_MSG_DELRULE, 0, in(c.Table, unix.NFTA_RULE_CHAIN, c.Name))
}

// AddSet creates a set; an existing one of that name must be equivalent. Its
// handle is in Handles once the batch is committed.
func (b *Batch) AddSet(s Set) {
	a := in(s.Table, unix.NFTA_SET_NAME, s.Name)
	// The kernel requires an ID. It matters only to rules in the same transaction
	// that refer to the set by ID; ours refer to it by name.
	a.AddUint32(unix.NFTA_SET_ID, uint32(len(b.msgs)+1))
	a.AddUint32(unix.NFTA_SET_FLAGS, s.Flags)
	a.AddUint32(unix.NFTA_SET_KEY_TYPE, s.KeyType)
	a.AddUint32(unix.NFTA_SET_KEY_LEN, s.KeyLen)
	if s.DataLen > 0 {
		a.AddUint32(unix.NFTA_SET_DATA_TYPE, s.DataType)
		a.AddUint32(unix.NFTA_SET_DATA_LEN, s.DataLen)
	}
	if s.Size > 0 {
		a.nest(unix.NFTA_SET_DESC, func() { a.AddUint32(unix.NFTA_SET_DESC_SIZE, s.Size) })
	}
	if len(s.UserData) > 0 {
		a.AddBytes(unix.NFTA_SET_USERDATA, s.UserData)
	}
	b.add(s.Family, unix.NFT_MSG_NEWSET, netlink.Create|netlink.Echo, a)
}

// recordHandle records the handle of a table or set that the kernel echoes. Other messages have none.
func (b *Batch) recordHandle(m netlink.Message) {
	if len(m.Data) < headerLen {
		return
	}
	if b.Handles == nil {
		b.Handles = map[string]uint64{}
	}
	a := Attrs(m.Data[headerLen:])
	switch m.Header.Type {
	case unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWTABLE:
		b.Handles[a.Str(unix.NFTA_TABLE_NAME)] = a.Uint64(tableHandle)
	case unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWSET:
		b.Handles[a.Str(unix.NFTA_SET_NAME)] = a.Uint64(setHandle)
	}
}

// DelSet deletes a set, which must be unreferenced.
func (b *Batch) DelSet(family Family, table, set string) {
	a := in(table, unix.NFTA_SET_NAME, set)
	b.add(family, unix.NFT_MSG_DELSET, 0, a)
}

// elementsPerMessage keeps the list in a message below the 64 KiB limit of an
// attribute: an IPv6 prefix takes 64 bytes.
const elementsPerMessage = 1000

// AddElements adds prefixes, which must not overlap, to an interval set.
func (b *Batch) AddElements(family Family, table, set string, prefixes []netip.Prefix) {
	for chunk := range slices.Chunk(prefixes, elementsPerMessage) {
		size := 2 * (16 + chunk[0].Addr().BitLen()/8) // two bounds with their headers, in bytes
		a := slices.Grow(in(table, unix.NFTA_SET_ELEM_LIST_SET, set), len(chunk)*size)
		a.nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func() {
			for _, p := range chunk {
				r := PrefixRange(p)
				a.element(r.First, false)
				// An interval that reaches the last address has no end.
				if next := r.Last.Next(); next.IsValid() {
					a.element(next, true)
				}
			}
		})
		b.add(family, unix.NFT_MSG_NEWSETELEM, netlink.Create, a)
		b.Elements += len(chunk)
	}
}

// A Mapping is an element of a map: from an address to another one or, in a verdict map, to the chain to which packets
// jump.
type Mapping struct {
	Key, Value netip.Addr
	Chain      string
}

// String returns the element as nft prints it.
func (m Mapping) String() string {
	if m.Chain != "" {
		return m.Key.String() + " : jump " + m.Chain
	}
	return m.Key.String() + " : " + m.Value.String()
}

// AddMappings adds elements, whose keys must be different, to a map.
func (b *Batch) AddMappings(family Family, table, set string, mappings []Mapping) {
	for chunk := range slices.Chunk(mappings, elementsPerMessage/2) { // they have a value, too
		a := in(table, unix.NFTA_SET_ELEM_LIST_SET, set)
		a.nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func() {
			for _, m := range chunk {
				a.nest(unix.NFTA_LIST_ELEM, func() {
					a.nest(unix.NFTA_SET_ELEM_KEY, func() { a.AddBytes(unix.NFTA_DATA_VALUE, m.Key.AsSlice()) })
					a.nest(unix.NFTA_SET_ELEM_DATA, func() {
						if m.Chain == "" {
							a.AddBytes(unix.NFTA_DATA_VALUE, m.Value.AsSlice())
							return
						}
						a.nest(unix.NFTA_DATA_VERDICT, func() {
							jump := int32(unix.NFT_JUMP)
							a.AddUint32(unix.NFTA_VERDICT_CODE, uint32(jump))
							a.str(unix.NFTA_VERDICT_CHAIN, m.Chain)
						})
					})
				})
			}
		})
		b.add(family, unix.NFT_MSG_NEWSETELEM, netlink.Create, a)
		b.Elements += len(chunk)
	}
}

// element appends an element. The lengths of its attributes are computed up front,
// because there can be millions of elements.
func (a *Attrs) element(addr netip.Addr, end bool) {
	size := addr.BitLen() / 8
	value := attrHeaderLen + size
	whole := attrHeaderLen + value
	if end {
		whole += attrHeaderLen + 4
	}
	a.header(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, whole)
	a.header(unix.NFTA_SET_ELEM_KEY|unix.NLA_F_NESTED, value)
	a.header(unix.NFTA_DATA_VALUE, size)
	*a, _ = addr.WithZone("").AppendBinary(*a)
	if end {
		a.AddUint32(unix.NFTA_SET_ELEM_FLAGS, unix.NFT_SET_ELEM_INTERVAL_END)
	}
}

// AddCounter creates a named counter; an existing one keeps its values.
func (b *Batch) AddCounter(family Family, table, name string) {
	a := in(table, unix.NFTA_OBJ_NAME, name)
	a.AddUint32(unix.NFTA_OBJ_TYPE, unix.NFT_OBJECT_COUNTER)
	a.nest(unix.NFTA_OBJ_DATA, func() {
		a.uint64(unix.NFTA_COUNTER_BYTES, 0)
		a.uint64(unix.NFTA_COUNTER_PACKETS, 0)
	})
	b.add(family, unix.NFT_MSG_NEWOBJ, netlink.Create, a)
}

// DelObject deletes a stateful object, which must be unreferenced.
func (b *Batch) DelObject(o Object) {
	a := in(o.Table, unix.NFTA_OBJ_NAME, o.Name)
	a.AddUint32(unix.NFTA_OBJ_TYPE, o.Type)
	b.add(o.Family, unix.NFT_MSG_DELOBJ, 0, a)
}

// Attributes that golang.org/x/sys/unix does not name.
const (
	elemKeyEnd      = 10 // NFTA_SET_ELEM_KEY_END, Linux 5.6
	elemExpressions = 11 // NFTA_SET_ELEM_EXPRESSIONS, Linux 5.11
	setExpr         = 17 // NFTA_SET_EXPR
	setExpressions  = 18 // NFTA_SET_EXPRESSIONS, Linux 5.11
	chainFlags      = 10 // NFTA_CHAIN_FLAGS, Linux 5.6
	tableUse        = 3  // NFTA_TABLE_USE
	tableHandle     = 4  // NFTA_TABLE_HANDLE
	setHandle       = 16 // NFTA_SET_HANDLE
	setCount        = 20 // NFTA_SET_COUNT, Linux 6.18
)

package nfnetlink

import (
	"net/netip"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/iprange"
)

// A Batch is a transaction under construction. The zero value is empty.
type Batch struct {
	msgs []netlink.Message
	// Elements are many: they are written when the batch is sent, so that of
	// several batches one at a time takes the memory.
	elements map[int]elements // by the index of their message
	// Prefixes counts the elements that the batch adds.
	Prefixes int
	// Handles has the handle of each set that the batch made, by its name, once
	// it is committed. A set made anew under the same name has another one.
	Handles map[string]uint64
}

// Len gives the number of messages.
func (b *Batch) Len() int { return len(b.msgs) }

// messages gives the messages in full.
func (b *Batch) messages() []netlink.Message {
	msgs := slices.Clone(b.msgs)
	for i, e := range b.elements {
		msgs[i].Data = e.appendTo(msgs[i].Data)
	}
	return msgs
}

func (b *Batch) add(family Family, msg uint16, flags netlink.HeaderFlags, a attrs) {
	b.msgs = append(b.msgs, message(family, msg, flags, a))
}

func message(family Family, msg uint16, flags netlink.HeaderFlags, a attrs) netlink.Message {
	return netlink.Message{
		Header: netlink.Header{
			Type:  netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | msg),
			Flags: netlink.Request | flags,
		},
		Data: append([]byte{byte(family), unix.NFNETLINK_V0, 0, 0}, a...),
	}
}

// AddTable makes a table, or sets the flags of the one that is there to none,
// which wakes a dormant one.
func (b *Batch) AddTable(family Family, table string) {
	var a attrs
	a.str(unix.NFTA_TABLE_NAME, table)
	a.uint32(unix.NFTA_TABLE_FLAGS, 0)
	b.add(family, unix.NFT_MSG_NEWTABLE, netlink.Create, a)
}

// Refuse adds a message that every kernel refuses, so that the others of the batch are
// only tried: the error is then a [RefusedError] about the last message if the kernel
// would take them.
func (b *Batch) Refuse(family Family, table string) {
	var a attrs
	a.str(unix.NFTA_TABLE_NAME, table)
	a.uint32(unix.NFTA_TABLE_FLAGS, 1<<31) // no such flag
	b.add(family, unix.NFT_MSG_NEWTABLE, netlink.Create, a)
}

// DelTable deletes a table and all that is in it.
func (b *Batch) DelTable(family Family, table string) {
	var a attrs
	a.str(unix.NFTA_TABLE_NAME, table)
	b.add(family, unix.NFT_MSG_DELTABLE, 0, a)
}

// AddChain makes a chain. Where one of the name is there it must have the same
// hook; its policy is set.
func (b *Batch) AddChain(c Chain) {
	var a attrs
	a.str(unix.NFTA_CHAIN_TABLE, c.Table)
	a.str(unix.NFTA_CHAIN_NAME, c.Name)
	if c.Hook != nil {
		a.nest(unix.NFTA_CHAIN_HOOK, func() {
			a.uint32(unix.NFTA_HOOK_HOOKNUM, c.Hook.Number)
			a.uint32(unix.NFTA_HOOK_PRIORITY, uint32(c.Hook.Priority))
		})
		a.uint32(unix.NFTA_CHAIN_POLICY, c.Policy)
		a.str(unix.NFTA_CHAIN_TYPE, c.Hook.Type)
	}
	b.add(c.Family, unix.NFT_MSG_NEWCHAIN, netlink.Create, a)
}

// DelChain deletes a chain that has no rules and that no rule names.
func (b *Batch) DelChain(family Family, table, chain string) {
	var a attrs
	a.str(unix.NFTA_CHAIN_TABLE, table)
	a.str(unix.NFTA_CHAIN_NAME, chain)
	b.add(family, unix.NFT_MSG_DELCHAIN, 0, a)
}

// AddRule puts a rule at the end of its chain.
func (b *Batch) AddRule(r Rule) {
	b.add(r.Family, unix.NFT_MSG_NEWRULE, netlink.Create|netlink.Append, ruleAttrs(r))
}

// InsertRule puts a rule before the one with the given handle.
func (b *Batch) InsertRule(r Rule, before uint64) {
	a := ruleAttrs(r)
	a.uint64(unix.NFTA_RULE_POSITION, before)
	b.add(r.Family, unix.NFT_MSG_NEWRULE, netlink.Create, a)
}

// ReplaceRule puts a rule in the place of the one with its handle.
func (b *Batch) ReplaceRule(r Rule) {
	a := ruleAttrs(r)
	a.uint64(unix.NFTA_RULE_HANDLE, r.Handle)
	b.add(r.Family, unix.NFT_MSG_NEWRULE, netlink.Replace, a)
}

// MarshalRule returns the attributes (NFTA_RULE_…) by which a rule is made.
func MarshalRule(r Rule) []byte { return ruleAttrs(r) }

func ruleAttrs(r Rule) attrs {
	var a attrs
	a.str(unix.NFTA_RULE_TABLE, r.Table)
	a.str(unix.NFTA_RULE_CHAIN, r.Chain)
	a.nest(unix.NFTA_RULE_EXPRESSIONS, func() {
		for _, e := range r.Exprs {
			a.nest(unix.NFTA_LIST_ELEM, func() {
				a.str(unix.NFTA_EXPR_NAME, e.Name)
				a.bytes(unix.NFTA_EXPR_DATA|unix.NLA_F_NESTED, e.Data)
			})
		}
	})
	if len(r.UserData) > 0 {
		a.bytes(unix.NFTA_RULE_USERDATA, r.UserData)
	}
	return a
}

// DelRule deletes the rule with this handle.
func (b *Batch) DelRule(family Family, table, chain string, handle uint64) {
	var a attrs
	a.str(unix.NFTA_RULE_TABLE, table)
	a.str(unix.NFTA_RULE_CHAIN, chain)
	a.uint64(unix.NFTA_RULE_HANDLE, handle)
	b.add(family, unix.NFT_MSG_DELRULE, 0, a)
}

// FlushChain deletes all rules of a chain; of every chain of the table where
// chain is empty.
func (b *Batch) FlushChain(family Family, table, chain string) {
	var a attrs
	a.str(unix.NFTA_RULE_TABLE, table)
	if chain != "" {
		a.str(unix.NFTA_RULE_CHAIN, chain)
	}
	b.add(family, unix.NFT_MSG_DELRULE, 0, a)
}

// AddSet makes a set; where one of the name is there it must be alike. Its
// handle is in Handles once the batch is committed.
func (b *Batch) AddSet(s Set) {
	var a attrs
	a.str(unix.NFTA_SET_TABLE, s.Table)
	a.str(unix.NFTA_SET_NAME, s.Name)
	// The kernel wants an id; it matters only to rules of the same transaction
	// that name the set by it, and ours name it by its name.
	a.uint32(unix.NFTA_SET_ID, uint32(len(b.msgs)+1))
	a.uint32(unix.NFTA_SET_FLAGS, s.Flags)
	a.uint32(unix.NFTA_SET_KEY_TYPE, s.KeyType)
	a.uint32(unix.NFTA_SET_KEY_LEN, s.KeyLen)
	if s.DataLen > 0 {
		a.uint32(unix.NFTA_SET_DATA_TYPE, s.DataType)
		a.uint32(unix.NFTA_SET_DATA_LEN, s.DataLen)
	}
	if len(s.UserData) > 0 {
		a.bytes(unix.NFTA_SET_USERDATA, s.UserData)
	}
	b.add(s.Family, unix.NFT_MSG_NEWSET, netlink.Create|netlink.Echo, a)
}

// made notes the handle of a set that the kernel sends back.
func (b *Batch) made(m netlink.Message) {
	if m.Header.Type != netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWSET) || len(m.Data) < 4 {
		return
	}
	if s, err := parseSet(Family(m.Data[0]), m.Data[4:]); err == nil {
		if b.Handles == nil {
			b.Handles = map[string]uint64{}
		}
		b.Handles[s.Name] = s.Handle
	}
}

// DelSet deletes a set that no rule names.
func (b *Batch) DelSet(family Family, table, set string) {
	var a attrs
	a.str(unix.NFTA_SET_TABLE, table)
	a.str(unix.NFTA_SET_NAME, set)
	b.add(family, unix.NFT_MSG_DELSET, 0, a)
}

// elementsPerMessage keeps a message's list below the 64 KiB that an attribute
// can hold: an IPv6 prefix takes 64 bytes.
const elementsPerMessage = 1000

// AddElements puts prefixes, which must not overlap, into an interval set.
func (b *Batch) AddElements(family Family, table, set string, prefixes []netip.Prefix) {
	for chunk := range slices.Chunk(prefixes, elementsPerMessage) {
		if b.elements == nil {
			b.elements = map[int]elements{}
		}
		b.elements[len(b.msgs)] = elements{table, set, chunk}
		b.add(family, unix.NFT_MSG_NEWSETELEM, netlink.Create, nil)
		b.Prefixes += len(chunk)
	}
}

// A Mapping is a key of a map of addresses and its value.
type Mapping struct{ Key, Value netip.Addr }

// AddMappings puts keys that differ and their values into a map of addresses.
func (b *Batch) AddMappings(family Family, table, set string, mappings []Mapping) {
	for chunk := range slices.Chunk(mappings, elementsPerMessage) {
		var a attrs
		a.str(unix.NFTA_SET_ELEM_LIST_TABLE, table)
		a.str(unix.NFTA_SET_ELEM_LIST_SET, set)
		a.nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func() {
			for _, m := range chunk {
				a.nest(unix.NFTA_LIST_ELEM, func() {
					a.nest(unix.NFTA_SET_ELEM_KEY, func() { a.bytes(unix.NFTA_DATA_VALUE, m.Key.AsSlice()) })
					a.nest(unix.NFTA_SET_ELEM_DATA, func() { a.bytes(unix.NFTA_DATA_VALUE, m.Value.AsSlice()) })
				})
			}
		})
		b.add(family, unix.NFT_MSG_NEWSETELEM, netlink.Create, a)
	}
}

// elements are what one message puts into a set.
type elements struct {
	table, set string
	prefixes   []netip.Prefix
}

func (e elements) appendTo(a attrs) attrs {
	most := 64 // bytes of an IPv6 prefix
	if e.prefixes[0].Addr().Is4() {
		most = 40
	}
	a = slices.Grow(a, len(e.prefixes)*most+len(e.table)+len(e.set)+32)
	a.str(unix.NFTA_SET_ELEM_LIST_TABLE, e.table)
	a.str(unix.NFTA_SET_ELEM_LIST_SET, e.set)
	a.nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func() {
		for _, p := range e.prefixes {
			r := iprange.Of(p)
			a.element(r.From, false)
			// An interval that reaches the last address has no end.
			if behind := r.To.Next(); behind.IsValid() {
				a.element(behind, true)
			}
		}
	})
	return a
}

func (a *attrs) element(addr netip.Addr, end bool) {
	if addr.Is4() {
		key := addr.As4()
		a.key(key[:], end)
	} else {
		key := addr.As16()
		a.key(key[:], end)
	}
}

// key appends an element. Its attributes are written with their lengths, because
// there can be millions.
func (a *attrs) key(key []byte, end bool) {
	value := attrHeaderLen + len(key)
	whole := attrHeaderLen + value
	if end {
		whole += attrHeaderLen + 4
	}
	a.header(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, whole)
	a.header(unix.NFTA_SET_ELEM_KEY|unix.NLA_F_NESTED, value)
	a.header(unix.NFTA_DATA_VALUE, len(key))
	*a = append(*a, key...)
	if end {
		a.uint32(unix.NFTA_SET_ELEM_FLAGS, unix.NFT_SET_ELEM_INTERVAL_END)
	}
}

// AddCounter makes a named counter; one that is there goes on counting.
func (b *Batch) AddCounter(family Family, table, name string) {
	var a attrs
	a.str(unix.NFTA_OBJ_TABLE, table)
	a.str(unix.NFTA_OBJ_NAME, name)
	a.uint32(unix.NFTA_OBJ_TYPE, unix.NFT_OBJECT_COUNTER)
	a.nest(unix.NFTA_OBJ_DATA, func() {
		a.uint64(unix.NFTA_COUNTER_BYTES, 0)
		a.uint64(unix.NFTA_COUNTER_PACKETS, 0)
	})
	b.add(family, unix.NFT_MSG_NEWOBJ, netlink.Create, a)
}

// DelObject deletes a stateful object that no rule names.
func (b *Batch) DelObject(o Object) {
	var a attrs
	a.str(unix.NFTA_OBJ_TABLE, o.Table)
	a.str(unix.NFTA_OBJ_NAME, o.Name)
	a.uint32(unix.NFTA_OBJ_TYPE, o.Type)
	b.add(o.Family, unix.NFT_MSG_DELOBJ, 0, a)
}

// DelFlowtable deletes a flowtable that no rule names.
func (b *Batch) DelFlowtable(family Family, table, name string) {
	var a attrs
	a.str(flowtableTable, table)
	a.str(flowtableName, name)
	b.add(family, unix.NFT_MSG_DELFLOWTABLE, 0, a)
}

// Attributes that golang.org/x/sys/unix does not name.
const (
	elemKeyEnd      = 10 // NFTA_SET_ELEM_KEY_END, Linux 5.6
	elemExpressions = 11 // NFTA_SET_ELEM_EXPRESSIONS, Linux 5.11
	setExpr         = 17 // NFTA_SET_EXPR
	setExpressions  = 18 // NFTA_SET_EXPRESSIONS, Linux 5.11
	flowtableTable  = 1  // NFTA_FLOWTABLE_TABLE
	flowtableName   = 2  // NFTA_FLOWTABLE_NAME
	chainFlags      = 10 // NFTA_CHAIN_FLAGS, Linux 5.6
	setHandle       = 16 // NFTA_SET_HANDLE
	setCount        = 20 // NFTA_SET_COUNT, Linux 6.18
)

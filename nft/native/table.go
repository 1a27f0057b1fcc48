package native

import (
	"fmt"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
)

// An ourTable is our table as the kernel has it.
type ourTable struct {
	nfnetlink.Table
	exists  bool
	chains  map[string]*ourChain
	flooded bool                     // it has so many rules that not all were read
	sets    map[string]nfnetlink.Set // by their names in the kernel
	objects []nfnetlink.Object
}

// An ourChain is a chain of our table. It holds no compiled rules, because there may be hundreds of chains at each
// check.
type ourChain struct {
	nfnetlink.Chain
	wanted bool // the wanted table has a chain of this name
	rules  []nfnetlink.Rule
	unread bool // its rules were not read
}

// slack is how many unexpected rules, or elements of a set, are read and listed. Beyond that only their number is
// reported, because other programs can add more than fits our memory.
const slack = 5_000

func newTable() *ourTable { return &ourTable{sets: map[string]nfnetlink.Set{}} }

// read reads our table without rules and elements.
func (t *ourTable) read(c *nfnetlink.Conn) (err error) {
	t.Table, err = c.Table(nfnetlink.Inet, nft.TableName)
	if nfnetlink.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read table: %w", err)
	}
	t.exists = true
	t.chains = make(map[string]*ourChain, t.Use)
	err = c.EachChain(nfnetlink.Inet, nft.TableName, func(ch nfnetlink.Chain) {
		t.chains[ch.Name] = &ourChain{Chain: ch}
	})
	if err != nil {
		return err
	}
	sets, err := c.Sets(nfnetlink.Inet, nft.TableName)
	if err != nil {
		return err
	}
	for _, set := range sets {
		if set.Flags&unix.NFT_SET_ANONYMOUS == 0 { // an anonymous set goes with its rule
			t.sets[set.Name] = set
		}
	}
	t.objects, err = c.Objects(nfnetlink.Inet, nft.TableName)
	return err
}

// unexpected describes what the table has that cannot be in the wanted one, and cannot be deleted without it.
func (t *ourTable) unexpected() (texts []string) {
	name := tableName()
	switch {
	case t.Dormant():
		texts = append(texts, name+" is dormant")
	case t.Flags != 0:
		texts = append(texts, name+" has the flag owner or persist")
	case t.hides():
		texts = append(texts, name+" has something that is not in the config, such as a flowtable")
	}
	for _, name := range slices.Sorted(maps.Keys(t.sets)) {
		if !likeOurs(t.sets[name]) {
			texts = append(texts, fmt.Sprintf("set %s is not in the config", nfnetlink.Quote(name)))
		}
	}
	for _, x := range t.objects {
		if x.Type != unix.NFT_OBJECT_COUNTER {
			texts = append(texts, fmt.Sprintf("object %s is not in the config", nfnetlink.Quote(x.Name)))
		}
	}
	return texts
}

// hides reports whether the kernel counts more than it lists.
func (t *ourTable) hides() bool { return int(t.Use) > len(t.chains)+len(t.sets)+len(t.objects) }

// onlyHides reports whether nothing else is unexpected than that.
func (t *ourTable) onlyHides() bool { return t.hides() && len(t.unexpected()) == 1 }

func tableName() string { return fmt.Sprintf("table %s %s", nfnetlink.Inet, nft.TableName) }

// anyRuleRefersTo reports whether a rule of any chain refers to a set.
func (t *ourTable) anyRuleRefersTo(set string) bool {
	for _, c := range t.chains {
		if c.refersTo(set) {
			return true
		}
	}
	return false
}

// refersTo reports whether a rule of the chain refers to a set.
func (c *ourChain) refersTo(set string) bool {
	return slices.ContainsFunc(c.rules, func(r nfnetlink.Rule) bool { return slices.Contains(r.Sets(), set) })
}

// hasStatements reports whether elements of a set have statements.
func (t *ourTable) hasStatements() bool {
	for _, s := range t.sets {
		if s.HasStatements() {
			return true
		}
	}
	return false
}

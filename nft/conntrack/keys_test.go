package conntrack

import (
	"net/netip"
	"reflect"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest/cases"
)

// variants returns the connections that an entry can be of: with each value of what an entry
// does not tell.
func variants(t *testing.T, e *Entry) []nft.Connection {
	t.Helper()
	all := []nft.Connection{{Src: e.Original.Src.Addr(), Dst: e.Destination().Addr()}}
	told := map[string]bool{"Src": true, "Dst": true, "FromNode": true, "ToNode": true} // the last two by the addresses
	for i := range reflect.TypeFor[nft.Connection]().NumField() {
		f := reflect.TypeFor[nft.Connection]().Field(i)
		if told[f.Name] {
			continue
		}
		values := []reflect.Value{}
		switch f.Type.Kind() {
		case reflect.String:
			for _, name := range append(cases.Interfaces(), "cni0", "") {
				values = append(values, reflect.ValueOf(name))
			}
		case reflect.Bool:
			values = []reflect.Value{reflect.ValueOf(false), reflect.ValueOf(true)}
		case reflect.Int, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
			for _, n := range []uint64{0, 1, 6, 17, 53, 80, 443, 8080, 65535} {
				values = append(values, reflect.ValueOf(n).Convert(f.Type))
			}
		default:
			t.Fatalf("which values of nft.Connection.%s can a connection have that an entry does not tell?", f.Name)
		}
		var more []nft.Connection
		for _, c := range all {
			for _, v := range values {
				reflect.ValueOf(&c).Elem().Field(i).Set(v.Convert(f.Type))
				more = append(more, c)
			}
		}
		all = more
	}
	return all
}

// What a judge says of an entry is so for each connection that it can be of, whatever keys the
// policy has: otherwise connections are deleted that are right.
func TestJudgeOfTrackedConnectionsKnowsEachKey(t *testing.T) {
	hosts := map[bool][]string{
		false: {"10.244.1.2", "10.244.9.7", "10.9.0.9", "10.8.0.9", "203.0.113.9", "198.51.100.9", "169.254.1.1"},
		true:  {"fd00:10:244:1::2", "fd00:9::9", "2001:db8:1::9", "2001:db8:2::9"},
	}
	cases.EachKey(t, func(t *testing.T, k cases.Key) {
		for _, text := range k.Files() {
			c, problems := config.Parse(config.Defaults{}, config.Source{Name: "f", Data: []byte(text)})
			if problems.Err() != nil {
				t.Fatal(problems)
			}
			p := nft.NewPolicy(c, nft.Options{Layout: native.Layout{}})
			j := NewJudge(p, alone)
			for _, of := range hosts {
				for _, src := range of {
					for _, dst := range of {
						for _, port := range []uint16{53, 443, 7777} {
							from := netip.AddrPortFrom(netip.MustParseAddr(src), 40000).String()
							e := entryOf(unix.IPPROTO_TCP, from, "", netip.AddrPortFrom(netip.MustParseAddr(dst), port).String(), from)
							checkVariants(t, p, j, &e, k.Name+"\n"+text)
						}
					}
				}
			}
		}
	})
}

func checkVariants(t *testing.T, p nft.Policy, j *Judge, e *Entry, about string) {
	t.Helper()
	now := j.Now(e)
	for _, c := range variants(t, e) {
		if is := judge.Decide(p, c); now != "" && now != is {
			t.Fatalf("Judge.Now says %s, but %+v is %s: it, or the Region that it asks, does not know %s", now, c, is, about)
		}
	}
}

package observe

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"nft-masq-agent/cmd/nft-masq-agent/internal/agent"
	"nft-masq-agent/config"
	"nft-masq-agent/nft/routes"
)

// interfacesOf are those with these names; with "=", after which is the bridge of a port.
func interfacesOf(names ...string) (all []routes.Interface) {
	for _, name := range names {
		name, master, port := strings.Cut(name, "=")
		i := routes.Interface{Name: name, Master: master}
		if port {
			i.MasterKind = "bridge"
		}
		all = append(all, i)
	}
	return all
}

func TestMissingInterfacesAreLoggedOnceAndCounted(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.interfaces = interfacesOf("lo", "eth0")
		w.files <- agent.Files{Sources: []config.Source{{Name: "config", Data: []byte(
			"masqueradeSrcInterfaces: [cni0, \"veth*\"]\nnonMasqueradeOutInterfaces: [wg0, \"eth*\"]\n")}}}
		synctest.Wait()
		const unmatched = "a list of interfaces matches nothing on this node"
		const missing = "an interface of the config carries no packets on this node"
		wantLines(t, w.messages(), "starting", "applied", unmatched, missing)
		for _, tt := range []struct {
			interfaces []string
			lists      string
			says       []string
		}{
			{nil, "1", nil},
			{[]string{"lo", "eth0", "veth1=br7"}, "1", []string{unmatched}}, // another reason
			{[]string{"lo", "eth0", "veth1=br7"}, "1", nil},
			{[]string{"lo", "eth0", "veth1"}, "0", []string{missing}}, // cni0; a veth is enough
			{[]string{"lo", "eth0", "veth1", "cni0", "wg0"}, "0", []string{"all interfaces of the config exist"}},
			{[]string{"lo", "eth0", "veth1=cni0", "cni0", "wg0"}, "0", nil}, // cni0 is in the list
			{[]string{"lo", "eth0", "wg0"}, "1", []string{unmatched}},
		} {
			if tt.interfaces != nil {
				w.locked(func() { w.interfaces = interfacesOf(tt.interfaces...) })
			}
			pass(2 * time.Minute)
			wantLines(t, w.messages(), tt.says...)
			wantMetrics(t, w, "unmatched_interface_lists "+tt.lists+"\n", "unmatched_interface_lists")
		}
		text := []byte("nonMasqueradeOutInterfaces: [wg1]\n")
		w.gets(agent.Files{Sources: []config.Source{{Name: "config", Data: text}}})
		wantLines(t, w.messages(), "applied", missing)
	})
}

package agent

import (
	"testing"
	"testing/synctest"
	"time"

	"nft-masq-agent/config"
)

func TestMissingInterfacesAreLoggedOnceAndCounted(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.interfaces = []string{"lo", "eth0"}
		w.files <- Files{Sources: []config.Source{{Name: "config", Data: []byte(
			"masqueradeSrcInterfaces: [cni0, \"veth*\"]\nnonMasqueradeOutInterfaces: [wg0, \"eth*\"]\n")}}}
		synctest.Wait()
		const missing, none = "an interface of the config does not exist on this node", "no interface of a list exists on this node: nothing is masqueraded"
		wantLines(t, w.messages(), "starting", "applied", none, none, missing)
		wantMetrics(t, w.agent, "unmatched_interface_lists 1\n", "unmatched_interface_lists")
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		wantLines(t, w.messages())

		w.interfaces = []string{"lo", "eth0", "veth1"}
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		wantLines(t, w.messages(), missing) // cni0; a veth is enough
		wantMetrics(t, w.agent, "unmatched_interface_lists 0\n", "unmatched_interface_lists")

		w.interfaces = append(w.interfaces, "cni0", "wg0")
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		wantLines(t, w.messages(), "all interfaces of the config exist")
	})
}

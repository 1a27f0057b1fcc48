package cluster_test

import (
	"net/netip"
	"strings"
	"testing"
)

// Three questions of a night, with the real kubectl, by the names of nodes and pods.
func TestPluginAnswersByPodName(t *testing.T) {
	w := newCluster(t)
	w.install("nftables")
	w.configure(policies[0])
	ask := func(question string, want ...string) {
		t.Helper()
		answer, err := w.Try("PATH=$PATH:$PWD/manifests; kubectl masq " + question)
		for _, text := range want {
			if err != nil || !strings.Contains(answer, text) {
				t.Errorf("kubectl masq %s: %v, want %q in\n%s", question, err, text, answer)
			}
		}
	}
	ask("fleet", "all 2 nodes are in sync with ", "\n"+w.nodes[0].Name+" ", "\n"+w.nodes[1].Name+" ")
	ask("status "+w.nodes[1].Name, "in sync: ")
	for _, f := range w.families {
		pod := "\n" + f.near.String() + " is the pod default/near\n"
		ask("explain --pod default/near "+f.masqueraded.String(), f.masqueraded.String()+" should see "+f.node1.String(), pod)
		ask("explain --pod default/near "+f.exempt.String(), f.exempt.String()+" should see "+f.near.String(), pod)
		seen, err := dialOnce(w.hosts["near"], f.near, "udp", netip.AddrPortFrom(f.masqueraded, 8080), patience)
		must(t, err)
		ask("connections --seen-as "+seen.Addr().String(), "on the node "+w.nodes[0].Name+":\n", pod)
		ask("connections --pod default/near", f.masqueraded.String(), pod)
	}
}

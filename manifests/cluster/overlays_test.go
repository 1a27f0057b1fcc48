package cluster_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// The kinds of the Prometheus Operator, as far as the API server has to know them.
const operatorKinds = `apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: %[2]s.monitoring.coreos.com}
spec:
  group: monitoring.coreos.com
  names: {kind: %[1]s, plural: %[2]s, singular: %[3]s}
  scope: Namespaced
  versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}]
---
`

// What is ours on a node, in any mode.
var ourRules = []string{"nft-masq-agent", "IP-MASQ-AGENT", "NON-MASQUERADE-DAEMON"}

// A way is one to install the agent and to remove it.
type way struct {
	name            string
	install, remove []string // command lines
	shows           string   // on a node that has it
	some            bool     // node2 has none
}

func TestEachOverlayAndTheChartOnNodes(t *testing.T) {
	w := newCluster(t)
	w.apply(exemptCIDRs)
	w.Sh("kubectl -n kube-system create configmap non-masquerade-daemon --from-file=" + w.Dir + "/config")
	w.Sh("kubectl label node node1 node.kubernetes.io/masq-agent-ds-ready=true")
	w.Sh("kubectl apply -f " + w.Write("kinds.yaml", fmt.Sprintf(operatorKinds, "PodMonitor", "podmonitors", "podmonitor")+
		fmt.Sprintf(operatorKinds, "PrometheusRule", "prometheusrules", "prometheusrule")))
	w.Sh("kubectl wait --for=condition=Established crd --all --timeout=1m")

	_, image := agentArchive(t)
	repository, tag, _ := strings.Cut(image, ":")
	flags := w.imageFlags()
	uninstall := []string{"make -s uninstall" + flags}
	components := func(name, daemonSet, shows string, some bool) way {
		return way{
			"overlay " + name,
			[]string{"make -s install" + flags + " COMPONENTS=" + name, enableIPv6(daemonSet), rollout(daemonSet)},
			uninstall, shows, some,
		}
	}
	const table = "table inet nft-masq-agent"
	chart := func(name, values, daemonSet, shows string) way {
		helm := func(verb, more string) string {
			return "$HELM -n kube-system " + verb + " nft-masq-agent manifests/helm" + more
		}
		return way{
			"chart, " + name,
			[]string{
				helm("install", " --set image.repository="+repository+",image.tag="+tag+" "+values), enableIPv6(daemonSet),
				rollout(daemonSet),
			},
			[]string{
				helm("upgrade", " --reuse-values --set removal=true"), rollout(daemonSet),
				"$HELM -n kube-system uninstall nft-masq-agent --wait",
			},
			shows, false,
		}
	}
	ways := 0
	for _, way := range []way{
		{
			"base",
			[]string{"make -s install" + flags, enableIPv6("nft-masq-agent"), rollout("nft-masq-agent")},
			uninstall, table, false,
		},
		components("iptables-nft", "nft-masq-agent", "chain IP-MASQ-AGENT", false),
		components("labelled-nodes", "nft-masq-agent", table, true),
		components("non-masquerade-daemon", "non-masquerade-daemon", "chain NON-MASQUERADE-DAEMON", false),
		components("prometheus", "nft-masq-agent", table, false),
		components("prometheus-operator", "nft-masq-agent", table, false),
		components("takeover", "ip-masq-agent", table, false),
		chart("its own ConfigMap", "--set-file config="+w.Dir+"/config", "nft-masq-agent", table),
		chart("mode=iptables-nft", "--set mode=iptables-nft", "nft-masq-agent", "chain IP-MASQ-AGENT"),
		chart("nonMasqueradeDaemon", "--set nonMasqueradeDaemon=true", "non-masquerade-daemon",
			"chain NON-MASQUERADE-DAEMON"),
		chart("takeover", "--set takeover=true", "ip-masq-agent", table),
		chart("waitForRules", "--set waitForRules=true", "nft-masq-agent", table),
		chart("everything of Prometheus", "--set prometheus.enabled=true,podMonitor.enabled=true,prometheusRule.enabled=true",
			"nft-masq-agent", table),
	} {
		ways++
		t.Run(way.name, func(t *testing.T) { w.try(t, way) })
	}
	w.rows = []string{fmt.Sprintf("| %d | %d |", ways, w.connections/ways)}
	w.record("overlays", "ways | connections of each")
}

// try installs the agent, compares what the far end sees, and removes it.
func (w *world) try(t *testing.T, way way) {
	for _, line := range way.install {
		w.Sh(line)
	}
	for i, n := range w.nodes {
		w.holds(n, way.shows, i == 0 || !way.some)
	}
	if strings.Contains(strings.ToLower(way.name), "prometheus") {
		w.Sh("curl -sSf http://" + w.nodes[1].V4.String() + ":9717/metrics | grep '^nft_masq_agent_ready 1'")
	}
	if strings.Contains(way.name, "waitForRules") {
		w.kustomization("waiting", fmt.Sprintf(sender, "waiting", agnhostImage, 8081), "wait-for-rules")
		w.Sh("kubectl rollout status deployment/waiting --timeout=3m && kubectl delete deployment waiting " +
			"--cascade=foreground")
	}
	decided := slices.DeleteFunc(rows(), func(r row) bool { return !r.explained })
	for i := range decided {
		decided[i].explained = false // only the far end is asked
	}
	w.matrix(t, way.name, w.families, decided, policies[0])
	for _, line := range way.remove {
		w.Sh(line)
	}
	w.Await("no objects", func() bool {
		out, err := w.Try("kubectl -n kube-system get all,podmonitors,prometheusrules -o name -l " +
			"app.kubernetes.io/name=nft-masq-agent")
		return err == nil && out == ""
	})
	var left []string
	for _, n := range w.nodes {
		out, err := n.NS.Output("", "nft", "list", "ruleset")
		must(t, err)
		for _, name := range ourRules {
			if strings.Contains(out, name) {
				left = append(left, n.Name+" "+name)
			}
		}
	}
	if len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

package cluster_test

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"nft-masq-agent/manifests/cluster"
	"nft-masq-agent/nft/nfttest"
)

// An older agent is what ip-masq-agent is to the cluster and to the kernel: its
// manifest, and the rules that one of its versions wrote, written again and again.
const olderAgent = `apiVersion: apps/v1
kind: DaemonSet
metadata: {name: ip-masq-agent, namespace: kube-system}
spec:
  selector: {matchLabels: {k8s-app: ip-masq-agent}}
  template:
    metadata: {labels: {k8s-app: ip-masq-agent}}
    spec:
      hostNetwork: true
      tolerations: [{operator: Exists}]
      terminationGracePeriodSeconds: 5
      containers:
        - name: ip-masq-agent
          image: localhost/ip-masq-agent:1
          args: [%s]
          securityContext: {privileged: false, capabilities: {add: [NET_ADMIN, NET_RAW]}}
`

// The first argument is the version. Like the agent itself the script appends the
// jump once, and replaces the chain in one transaction at each resync.
const olderScript = `trap 'exit 0' TERM
once= jump=
while :; do
	for p in iptables ip6tables; do
		[ -e "/$1.$p" ] || continue
		if [ -z "$once" ]; then cat "/$1.$p"; else
			grep -v '^-A POSTROUTING' "/$1.$p"; fi |
			"$p-nft-restore" --noflush || exit 1
	done
	once=1
	sleep 2 &
	wait $!
done
`

// The recorded rules that decide as the config does. The two after the versions are
// of v2.12: on a node that an older version left a jump on, and with --to-ports.
var olderVersions = []string{
	"ip-masq-agent-v0.3", "ip-masq-agent-v2.0.0", "ip-masq-agent-v2.9", "ip-masq-agent-v2.11",
	"ip-masq-agent-two-jumps", "ip-masq-agent-to-ports",
}

func TestTakeOverOfALiveAgentAndTheWayBack(t *testing.T) {
	w := newCluster(t)
	w.olderImage()
	plain := policies[0]
	with := w.imageFlags()
	holds := func(chain string, held bool) {
		w.t.Helper()
		for _, n := range w.nodes {
			w.holds(n, chain, held)
		}
	}
	for _, version := range olderVersions {
		chain, some := "chain IP-MASQ-AGENT", w.families
		if version == "ip-masq-agent-v0.3" {
			chain = "chain NON-MASQUERADE-DAEMON"
		}
		if v6, _ := filepath.Glob("../../testdata/foreign/" + version + "/rules.ip6tables"); v6 == nil {
			some = w.families[:1]
		}
		older := w.Write(version+".yaml", fmt.Sprintf(olderAgent, version))
		w.Sh("kubectl apply -f " + older + " && " + rollout("ip-masq-agent"))
		holds(chain, true)
		w.during(version+" taken over", plain, some, func() {
			w.Sh("kubectl -n kube-system create serviceaccount nft-masq-agent --dry-run=client -o yaml | kubectl apply -f -")
			w.Sh("make -s manifest COMPONENTS=takeover" + with +
				" | kubectl replace --save-config -f - && " + rollout("ip-masq-agent"))
			holds(chain, false)
			holds("table inet nft-masq-agent", true)
		})
		w.during("back to "+version, plain, some, func() {
			w.Sh("kubectl -n kube-system delete daemonset ip-masq-agent --cascade=foreground")
			w.Sh("kubectl apply -f " + older + " && " + rollout("ip-masq-agent"))
			holds(chain, true)
			w.Sh("make -s uninstall" + with)
			holds("nft-masq-agent", false)
		})
		holds(chain, true)
		w.Sh("kubectl -n kube-system delete daemonset ip-masq-agent --cascade=foreground")
		for _, n := range w.nodes {
			_, err := n.NS.Output("", "../../bin/linux_"+runtime.GOARCH+"/nft-masq-agent", "cleanup", "--legacy-only")
			must(t, err)
		}
	}
	w.record("takeover", "what happens | connections")
}

// olderImage imports an image into the nodes with the rules of the versions, and
// Debian's iptables to write them.
func (w *world) olderImage() {
	w.t.Helper()
	image := cluster.Image{
		Names: []string{"localhost/ip-masq-agent:1"}, Files: map[string]string{},
		Entrypoint: []string{"/bin/sh", "-c", olderScript, "ip-masq-agent"},
	}
	for path, name := range map[string]string{
		"/bin/sh": "dash", "/bin/cat": "cat", "/bin/grep": "grep", "/bin/sleep": "sleep",
		"/sbin/iptables-nft-restore": "iptables-nft-restore", "/sbin/ip6tables-nft-restore": "ip6tables-nft-restore",
	} {
		command := nfttest.Command(name)
		must(w.t, command.Err)
		image.AddProgram(w.t, path, command.Path)
	}
	matches, err := filepath.Glob("/usr/lib/*/xtables/*.so")
	must(w.t, err)
	for _, library := range matches {
		image.AddProgram(w.t, library, library)
	}
	for _, version := range olderVersions {
		for _, program := range []string{"iptables", "ip6tables"} {
			file := "../../testdata/foreign/" + version + "/rules." + program
			if _, err := os.Stat(file); err == nil {
				image.Files["/"+version+"."+program] = file
			}
		}
	}
	file := filepath.Join(w.Dir, "images", "older.tar")
	image.Archive(w.t, file)
	for _, n := range w.nodes {
		n.Ctr("images import " + file)
	}
}

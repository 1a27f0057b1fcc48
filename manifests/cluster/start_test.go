package cluster_test

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"nft-masq-agent/manifests/cluster"
)

// A witness is outside, and notes the source of each connection that arrives.
type witness struct {
	mu   sync.Mutex
	seen map[string][]sighting // by port, protocol and family: one sender after another
}

type sighting struct {
	at     time.Time
	source netip.Addr
}

func (s *witness) note(port uint16, proto string, from netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	from = from.Unmap()
	key := fmt.Sprint(port, proto, from.Is4())
	s.seen[key] = append(s.seen[key], sighting{time.Now(), from})
}

// since returns what arrived at a port after a time, in the order of each sender.
func (s *witness) since(port uint16, start time.Time) (senders [][]sighting) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, all := range s.seen {
		if !strings.HasPrefix(key, fmt.Sprint(port)) {
			continue
		}
		for len(all) > 0 && all[0].at.Before(start) {
			all = all[1:]
		}
		senders = append(senders, all)
	}
	return senders
}

// newWitness listens on ports of the outside host.
func (w *world) newWitness(ports ...uint16) *witness {
	w.t.Helper()
	s := &witness{seen: map[string][]sighting{}}
	for _, f := range w.families {
		for _, port := range ports {
			answer(w.t, w.outside, netip.AddrPortFrom(f.masqueraded, port), func(proto string, from netip.AddrPort) {
				s.note(port, proto, from.Addr())
			})
		}
	}
	return s
}

// A sender is a pod of node1 that opens connections to the outside host from its
// first moment on, with each protocol and family one after the other. Each has a
// port of its own: with the port of an earlier one it would share its translation.
const sender = `apiVersion: apps/v1
kind: Deployment
metadata: {name: %[1]s}
spec:
  selector: {matchLabels: {app: %[1]s}}
  template:
    metadata: {labels: {app: %[1]s}}
    spec:
      nodeName: node1
      tolerations: [{operator: Exists}]
      terminationGracePeriodSeconds: 0
      containers:
        - name: c
          image: %[2]s
          securityContext: {runAsUser: 65534, runAsNonRoot: true, allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}, seccompProfile: {type: RuntimeDefault}}
          command: [/bin/sh, -c]
          args:
            - |
              for to in 198.51.100.1 2001:db8:1::1; do
                i=20000; while :; do nc -p $i -w 1 $to %[3]d </dev/null; i=$((i + 1)); sleep 0.05; done &
                i=20000; while :; do echo x | nc -p $i -u -w 1 -q 0 $to %[3]d; i=$((i + 1)); sleep 0.05; done &
              done
              wait
`

// kustomization applies a manifest with one of our components and the image.
func (w *world) kustomization(name, manifest, component string) {
	w.t.Helper()
	_, image := agentArchive(w.t)
	repository, tag, _ := strings.Cut(image, ":")
	here, err := filepath.Abs("..")
	must(w.t, err)
	here, err = filepath.Rel(w.Dir, here) // kustomize takes no absolute paths
	must(w.t, err)
	w.Write(name+".yaml", manifest)
	w.Write("kustomization.yaml", fmt.Sprintf("resources: [%s.yaml]\ncomponents: [%s/components/%s]\nimages: [{name: "+
		"nft-masq-agent, newName: %s, newTag: %s}]\n",
		name, here, component, repository, tag))
	w.Sh("$KUSTOMIZE build " + w.Dir + " | kubectl apply -f -")
}

// wipe empties what the kernel of a node has, as a reboot does: rules, and tracked
// connections, whose translation a connection with the same ports would get.
func (w *world) wipe(n *cluster.Node) {
	w.t.Helper()
	w.nft(n, "flush ruleset")
	forget(w.t, n.NS)
}

func TestPodsThatStartBeforeTheAgent(t *testing.T) {
	w := newWorld(t)
	w.workload() // no namespace of a pod is kept open, which would outlive its node
	node := w.nodes[0]
	w.startProxies("nftables")
	plain := policies[0]
	w.apply(plain.config)
	w.install("nftables", "prometheus")
	w.configure(plain)
	const atOnce, waits = 8081, 8082
	w.Sh("kubectl label namespace default pod-security.kubernetes.io/enforce=restricted")
	s := w.newWitness(atOnce, waits)
	w.Sh("kubectl apply -f " + w.Write("plain.yaml", fmt.Sprintf(sender, "plain", agnhostImage, atOnce)))
	w.kustomization("waiting", fmt.Sprintf(sender, "waiting", agnhostImage, waits), "wait-for-rules")

	// enough is when each sender has opened connections that are right, and some more.
	right := func(source netip.Addr) bool { return source == node.V4 || source == node.V6 }
	enough := func(start time.Time) {
		w.t.Helper()
		w.Await("connections", func() bool {
			for _, port := range []uint16{atOnce, waits} {
				senders := s.since(port, start)
				if len(senders) != 4 {
					return false
				}
				for _, all := range senders {
					if len(all) < 50 || !right(all[len(all)-20].source) {
						return false
					}
				}
			}
			return true
		})
	}
	// judge counts: what is wrong until a sender's first right connection, and after.
	judge := func(port uint16, start time.Time) (all, before, after int, lasted time.Duration) {
		for _, sender := range s.since(port, start) {
			all += len(sender)
			stands := false
			for _, x := range sender {
				switch {
				case right(x.source):
					stands = true
				case stands:
					after++
				default:
					before++
					lasted = max(lasted, x.at.Sub(sender[0].at))
				}
			}
		}
		return all, before, after, lasted
	}
	row := func(what string, port uint16, start time.Time, mayBeWrong bool) {
		t.Run(what, func(t *testing.T) {
			all, before, after, lasted := judge(port, start)
			early := fmt.Sprint(before)
			if before > 0 {
				early += ", for " + lasted.Round(100*time.Millisecond).String()
			}
			w.rows = append(w.rows, fmt.Sprintf("| %s | %d | %s |", what, all, early))
			if after > 0 || before > 0 && !mayBeWrong {
				t.Errorf("%d connections, %d wrong before the rules for %s, %d after", all, before, lasted, after)
			}
		})
	}
	boot := func(meanwhile func(start time.Time)) time.Time {
		start := time.Now()
		node.Start()
		node.StartProxy("nftables")
		meanwhile(start)
		enough(start)
		return start
	}
	nothing := func(time.Time) {}
	rows := func(what string, start time.Time, mayBeWrong bool) {
		row(what, atOnce, start, mayBeWrong)
		row(what+", `wait-for-rules`", waits, start, false)
	}

	enough(time.Now())
	node.Kill()
	rows("node starts again, its rules kept", boot(nothing), false)
	// An update has made the agent's pod the newest.
	w.Sh("kubectl -n kube-system rollout restart daemonset/nft-masq-agent && " + rollout("nft-masq-agent"))
	for i := range 3 {
		node.Kill()
		w.wipe(node)
		rows(fmt.Sprintf("node reboots (%d)", i+1), boot(nothing), true)
	}
	// A new node has no image of the agent at first.
	archive, image := agentArchive(t)
	node.Ctr("images rm --sync " + image)
	node.Kill()
	w.wipe(node)
	start := boot(func(start time.Time) {
		w.Await("connections", func() bool {
			all, _, _, _ := judge(atOnce, start)
			return all >= 100
		})
		node.Ctr("images import " + archive)
	})
	rows("node reboots without the image", start, true)
	if _, before, _, _ := judge(atOnce, start); before == 0 {
		t.Error("without an agent no connection was wrong: the witness sees nothing")
	}
	w.record("start", "what happens | connections | wrong before the first rules")
}

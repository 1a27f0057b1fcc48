// Dashboard draws a picture of manifests/grafana/dashboard.json with the metrics of a real run: two nodes in
// network namespaces, each with an agent and a pod that opens connections, and a Prometheus that scrapes both
// and evaluates the expressions of the file. The drawing is this program's, not Grafana's.
//
//	dashboard AGENT PROMETHEUS dashboard.json PICTURE.svg
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/agent"
	"nft-masq-agent/nft/nfttest/netns"
)

func main() {
	if len(os.Args) != 5 {
		fmt.Fprintln(os.Stderr, "usage: dashboard AGENT PROMETHEUS dashboard.json PICTURE.svg")
		os.Exit(2)
	}
	if code, ran := netns.InUserNS(); ran {
		os.Exit(code)
	}
	if err := nfttest.Part(func() { run(os.Args[1], os.Args[2], os.Args[3], os.Args[4]) }); err != nil {
		fmt.Fprintln(os.Stderr, "dashboard:", err)
		os.Exit(1)
	}
}

func run(program, prometheus, file, picture string) {
	d := nfttest.Must(read(file))
	dir := nfttest.Must(os.MkdirTemp("", "nft-masq-agent-dashboard-"))
	defer func() { nfttest.Check(os.RemoveAll(dir)) }()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	nodes := make([]*node, 2)
	for i := range nodes {
		nodes[i] = startNode(dir, i+1, program)
		defer func() { nfttest.Check(nodes[i].Close()) }()
	}
	p := startPrometheus(dir, prometheus, nodes)
	defer func() { nfttest.Check(p.stop()) }()
	begin := time.Now()
	play(ctx, nodes)
	for i := range d.Panels {
		p.fill(ctx, &d.Panels[i], begin, time.Now())
	}
	nfttest.Check(os.WriteFile(picture, []byte(d.draw()), 0o644))
}

// A node is a node with a pod, an agent and its config.
type node struct {
	*nfttest.Topology
	name, config string
	agent        *agent.Agent
}

// The configs of the run.
const (
	first    = "nonMasqueradeCIDRs: [10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16]\n"
	second   = "nonMasqueradeCIDRs: [10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16, 198.51.100.0/24]\n"
	rejected = "nonMasqueradeCIDRs: [10.0.0.1/8]\n"
)

func startNode(dir string, number int, program string) *node {
	n := &node{Topology: nfttest.Must(nfttest.OpenTopology()), name: fmt.Sprintf("node-%d", number)}
	n.config = filepath.Join(dir, n.name)
	n.swap(first)
	n.agent = nfttest.Must(agent.Start(n.Node, nfttest.Command(program, "run", "--config", n.config,
		"--http-address=127.0.0.1:9717")))
	nfttest.Must(n.agent.Await(context.Background(), "config_applied"))
	return n
}

func (n *node) Close() error { return errors.Join(n.agent.Stop(), n.Topology.Close()) }

func (n *node) swap(text string) {
	nfttest.Check(os.WriteFile(n.config+".new", []byte(text), 0o600))
	nfttest.Check(os.Rename(n.config+".new", n.config))
}

// open opens a connection from the pod, whose first datagram passes the rules.
func (n *node) open(ctx context.Context, to string) {
	conn := nfttest.Must(n.Pod.DialContext(ctx, "udp", to+":7000"))
	nfttest.Must(conn.Write([]byte("x")))
	nfttest.Check(conn.Close())
}

// play opens connections for 80 seconds. The config of the first node changes, that of the second is rejected and
// then follows, and another program flushes the first node's rules three times.
func play(ctx context.Context, nodes []*node) {
	flush := func() {
		nfttest.Must(nodes[0].Node.Output("", "nft", "flush", "ruleset"))
		nfttest.Must(nodes[0].agent.Await(ctx, "rules_restored"))
	}
	events := map[int]func(){
		20: func() { nodes[0].swap(second) }, 35: func() { nodes[1].swap(rejected) },
		45: flush, 47: flush, 58: flush,
		65: func() { nodes[1].swap(second) },
	}
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for i := range 800 {
		for number, n := range nodes {
			for range 3 + i/50%4 - number {
				for _, to := range []string{"203.0.113.9", "10.9.0.9"}[:1+i%2] {
					n.open(ctx, to)
				}
			}
		}
		if event := events[i/10]; event != nil && i%10 == 0 {
			event()
		}
		<-tick.C
	}
}

// A server is Prometheus on the first node.
type server struct {
	*os.Process
	wait  func() error
	query http.Client
}

func (s *server) stop() error {
	err := s.Kill()
	_ = s.wait() // it was killed
	return err
}

func startPrometheus(dir, program string, nodes []*node) *server {
	var targets strings.Builder
	for i, n := range nodes {
		address := fmt.Sprintf("127.0.0.1:%d", 9717+i)
		fmt.Fprintf(&targets, "      - {targets: ['%s'], labels: {node: %s}}\n", address, n.name)
		if i > 0 {
			relay(nodes[0].Node, address, n.Node, "127.0.0.1:9717")
		}
	}
	config := filepath.Join(dir, "prometheus.yml")
	text := "global: {scrape_interval: 1s}\nscrape_configs:\n  - job_name: nft-masq-agent\n    static_configs:\n" +
		targets.String()
	nfttest.Check(os.WriteFile(config, []byte(text), 0o600))
	cmd := nfttest.Command(program, "--config.file="+config, "--storage.tsdb.path="+filepath.Join(dir, "tsdb"),
		"--web.listen-address=127.0.0.1:9090", "--log.level=error")
	cmd.Stderr = os.Stderr
	process := nfttest.Must(nodes[0].Node.Start(cmd))
	return &server{cmd.Process, process.Wait, http.Client{
		Transport: &http.Transport{DialContext: nodes[0].Node.DialContext},
	}}
}

// relay connects an address of one namespace with that of another.
func relay(from *nfttest.NS, at string, to *nfttest.NS, address string) {
	var listener net.Listener
	nfttest.Check(from.Do(func() (err error) {
		listener, err = net.Listen("tcp", at)
		return err
	}))
	go func() {
		for {
			in, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer in.Close()
				out, err := to.DialContext(context.Background(), "tcp", address)
				if err != nil {
					return
				}
				defer out.Close()
				go func() { _, _ = io.Copy(out, in) }()
				_, _ = io.Copy(in, out)
			}()
		}
	}()
}

// fill evaluates the expressions of a panel.
func (s *server) fill(ctx context.Context, p *panel, begin, end time.Time) {
	for _, t := range p.Targets {
		expr := strings.NewReplacer("$__rate_interval", "5s", "$job", ".*", "$node", ".*").Replace(t.Expr)
		query := url.Values{
			"query": {expr}, "step": {"1"}, "start": {fmt.Sprint(begin.Unix())}, "end": {fmt.Sprint(end.Unix())},
		}
		req := nfttest.Must(http.NewRequestWithContext(ctx, http.MethodGet,
			"http://127.0.0.1:9090/api/v1/query_range?"+query.Encode(), nil))
		answer, err := s.query.Do(req)
		nfttest.Check(err)
		var body struct {
			Error string
			Data  struct{ Result []series }
		}
		err = errors.Join(json.NewDecoder(answer.Body).Decode(&body), answer.Body.Close())
		if err != nil || body.Error != "" {
			nfttest.Check(fmt.Errorf("%s: %s: %w", expr, body.Error, err))
		}
		for _, found := range body.Data.Result {
			found.name = t.name(found.Metric)
			p.found = append(p.found, found)
		}
	}
}

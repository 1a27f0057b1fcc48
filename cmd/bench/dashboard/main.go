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
)

func main() {
	if len(os.Args) != 5 {
		fmt.Fprintln(os.Stderr, "usage: dashboard AGENT PROMETHEUS dashboard.json PICTURE.svg")
		os.Exit(2)
	}
	if code, ran := nfttest.InUserNS(); ran {
		os.Exit(code)
	}
	if err := run(os.Args[1], os.Args[2], os.Args[3], os.Args[4]); err != nil {
		fmt.Fprintln(os.Stderr, "dashboard:", err)
		os.Exit(1)
	}
}

func run(program, prometheus, file, picture string) (err error) {
	d, err := read(file)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "nft-masq-agent-dashboard-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	nodes := make([]*node, 2)
	for i := range nodes {
		if nodes[i], err = startNode(dir, i+1, program); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, nodes[i].Close()) }()
	}
	p, err := startPrometheus(dir, prometheus, nodes)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.stop()) }()
	begin := time.Now()
	if err := play(ctx, nodes); err != nil {
		return err
	}
	for i := range d.Panels {
		if err := p.fill(ctx, &d.Panels[i], begin, time.Now()); err != nil {
			return fmt.Errorf("%s: %w", d.Panels[i].Title, err)
		}
	}
	return os.WriteFile(picture, []byte(d.draw()), 0o644)
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

func startNode(dir string, number int, program string) (*node, error) {
	top, err := nfttest.OpenTopology()
	if err != nil {
		return nil, err
	}
	n := &node{Topology: top, name: fmt.Sprintf("node-%d", number)}
	n.config = filepath.Join(dir, n.name)
	if err := n.swap(first); err != nil {
		return nil, errors.Join(err, top.Close())
	}
	n.agent, err = agent.Start(top.Node, nfttest.Command(program, "run", "--config", n.config,
		"--http-address=127.0.0.1:9717", "--conntrack-interval=5"))
	if err != nil {
		return nil, errors.Join(err, top.Close())
	}
	if _, err := n.agent.Await(context.Background(), "config_applied"); err != nil {
		return nil, errors.Join(err, n.Close())
	}
	return n, nil
}

func (n *node) Close() error { return errors.Join(n.agent.Stop(), n.Topology.Close()) }

func (n *node) swap(text string) error {
	if err := os.WriteFile(n.config+".new", []byte(text), 0o600); err != nil {
		return err
	}
	return os.Rename(n.config+".new", n.config)
}

// open opens a connection from the pod, whose first datagram passes the rules.
func (n *node) open(ctx context.Context, to string) error {
	conn, err := n.Pod.DialContext(ctx, "udp", to+":7000")
	if err != nil {
		return err
	}
	_, err = conn.Write([]byte("x"))
	return errors.Join(err, conn.Close())
}

// play opens connections for 80 seconds. The config of the first node changes, that of the second is rejected and
// then follows, and another program flushes the first node's rules three times.
func play(ctx context.Context, nodes []*node) error {
	flush := func() error {
		if _, err := nodes[0].Node.Output("", "nft", "flush", "ruleset"); err != nil {
			return err
		}
		_, err := nodes[0].agent.Await(ctx, "rules_restored")
		return err
	}
	events := map[int]func() error{
		20: func() error { return nodes[0].swap(second) }, 35: func() error { return nodes[1].swap(rejected) },
		45: flush, 47: flush, 58: flush,
		65: func() error { return nodes[1].swap(second) },
	}
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for i := range 800 {
		for number, n := range nodes {
			for range 3 + i/50%4 - number {
				for _, to := range []string{"203.0.113.9", "10.9.0.9"}[:1+i%2] {
					if err := n.open(ctx, to); err != nil {
						return err
					}
				}
			}
		}
		if event := events[i/10]; event != nil && i%10 == 0 {
			if err := event(); err != nil {
				return err
			}
		}
		<-tick.C
	}
	return nil
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

func startPrometheus(dir, program string, nodes []*node) (*server, error) {
	var targets strings.Builder
	for i, n := range nodes {
		address := fmt.Sprintf("127.0.0.1:%d", 9717+i)
		fmt.Fprintf(&targets, "      - {targets: ['%s'], labels: {node: %s}}\n", address, n.name)
		if i > 0 {
			if err := relay(nodes[0].Node, address, n.Node, "127.0.0.1:9717"); err != nil {
				return nil, err
			}
		}
	}
	config := filepath.Join(dir, "prometheus.yml")
	text := "global: {scrape_interval: 1s}\nscrape_configs:\n  - job_name: nft-masq-agent\n    static_configs:\n" +
		targets.String()
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return nil, err
	}
	cmd := nfttest.Command(program, "--config.file="+config, "--storage.tsdb.path="+filepath.Join(dir, "tsdb"),
		"--web.listen-address=127.0.0.1:9090", "--log.level=error")
	cmd.Stderr = os.Stderr
	process, err := nodes[0].Node.Start(cmd)
	if err != nil {
		return nil, err
	}
	return &server{cmd.Process, process.Wait, http.Client{
		Transport: &http.Transport{DialContext: nodes[0].Node.DialContext},
	}}, nil
}

// relay connects an address of one namespace with that of another.
func relay(from *nfttest.NS, at string, to *nfttest.NS, address string) error {
	var listener net.Listener
	err := from.Do(func() (err error) {
		listener, err = net.Listen("tcp", at)
		return err
	})
	if err != nil {
		return err
	}
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
	return nil
}

// fill evaluates the expressions of a panel.
func (s *server) fill(ctx context.Context, p *panel, begin, end time.Time) error {
	for _, t := range p.Targets {
		expr := strings.NewReplacer("$__rate_interval", "5s", "$job", ".*", "$node", ".*").Replace(t.Expr)
		query := url.Values{
			"query": {expr}, "step": {"1"}, "start": {fmt.Sprint(begin.Unix())}, "end": {fmt.Sprint(end.Unix())},
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodGet,
			"http://127.0.0.1:9090/api/v1/query_range?"+query.Encode(), nil)
		if err != nil {
			return err
		}
		answer, err := s.query.Do(req)
		if err != nil {
			return err
		}
		var body struct {
			Error string
			Data  struct{ Result []series }
		}
		err = errors.Join(json.NewDecoder(answer.Body).Decode(&body), answer.Body.Close())
		if err != nil || body.Error != "" {
			return fmt.Errorf("%s: %s: %w", expr, body.Error, err)
		}
		for _, found := range body.Data.Result {
			found.name = t.name(found.Metric)
			p.found = append(p.found, found)
		}
	}
	return nil
}

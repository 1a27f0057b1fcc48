package manifests_test

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/agent"
)

// A dashboard is a Grafana dashboard, as far as its panels query metrics.
type dashboard struct {
	Panels []struct {
		ID      int    `json:"id"`
		Title   string `json:"title"`
		GridPos struct{ X, Y, W, H int }
		Targets []struct {
			Expr string `json:"expr"`
		} `json:"targets"`
	} `json:"panels"`
}

func readDashboard(t *testing.T) dashboard {
	t.Helper()
	var d dashboard
	readYAML(t, "grafana/dashboard.json", &d) // JSON is YAML
	return d
}

// An alert is an alert in prometheus/rules.yaml.
type alert struct {
	Alert       string            `json:"alert"`
	Expr        string            `json:"expr"`
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
}

func readAlerts(t *testing.T) []alert {
	t.Helper()
	var rules struct {
		Groups []struct {
			Rules []alert `json:"rules"`
		} `json:"groups"`
	}
	readYAML(t, "prometheus/rules.yaml", &rules)
	var all []alert
	for _, g := range rules.Groups {
		all = append(all, g.Rules...)
	}
	return all
}

func TestDashboardAndAlertsUseDocumentedMetrics(t *testing.T) {
	readme := readFile(t, "README.md")
	var exprs []string
	for _, a := range readAlerts(t) {
		exprs = append(exprs, a.Expr)
	}
	for _, p := range readDashboard(t).Panels {
		for _, target := range p.Targets {
			exprs = append(exprs, target.Expr)
		}
	}
	names := regexp.MustCompile(`nft_masq_agent_[a-z_]+`)
	for _, expr := range exprs {
		if !names.MatchString(expr) {
			t.Errorf("queries none of our metrics: %s", expr)
		}
		for _, name := range names.FindAllString(expr, -1) {
			row := regexp.MustCompile("(?m)^\\| `" + strings.TrimSuffix(name, "_bucket") + "[`{]")
			if !row.MatchString(readme) {
				t.Errorf("%s is not in README.md", name)
			}
		}
	}
}

func TestAlertsHaveFiringAndSilentCases(t *testing.T) {
	var tests struct {
		Tests []struct {
			Cases []struct {
				Name   string `json:"alertname"`
				Alerts []any  `json:"exp_alerts"`
			} `json:"alert_rule_test"`
		} `json:"tests"`
	}
	readYAML(t, "prometheus/rules_test.yaml", &tests)
	fires, silent := map[string]bool{}, map[string]bool{}
	for _, test := range tests.Tests {
		for _, c := range test.Cases {
			fires[c.Name] = fires[c.Name] || len(c.Alerts) > 0
			silent[c.Name] = silent[c.Name] || len(c.Alerts) == 0
		}
	}
	for _, a := range readAlerts(t) {
		if !fires[a.Alert] || !silent[a.Alert] {
			t.Errorf("prometheus/rules_test.yaml: %s fires in a case: %t, is silent in one: %t", a.Alert, fires[a.Alert],
				silent[a.Alert])
		}
		if a.Labels["severity"] == "" {
			t.Errorf("%s has no severity", a.Alert)
		}
		// The command is one to paste.
		command := regexp.MustCompile(`kubectl masq (status|connections) \{\{ \$labels\.node \}\}`)
		if strings.Contains(a.Annotations["summary"], "$labels.node") && !command.MatchString(a.Annotations["runbook"]) {
			t.Errorf("%s concerns a node, and has no command for it: %s", a.Alert, a.Annotations["runbook"])
		}
		for _, name := range []string{"summary", "description", "runbook"} {
			if a.Annotations[name] == "" {
				t.Errorf("%s has no %s", a.Alert, name)
			}
		}
	}
}

func TestDashboardPanelsDoNotOverlap(t *testing.T) {
	taken, ids := map[[2]int]string{}, map[int]bool{}
	for _, p := range readDashboard(t).Panels {
		if ids[p.ID] || p.GridPos.X+p.GridPos.W > 24 {
			t.Errorf("%s: id %d is a duplicate, or the panel exceeds the right edge", p.Title, p.ID)
		}
		ids[p.ID] = true
		for x := range p.GridPos.W {
			for y := range p.GridPos.H {
				at := [2]int{p.GridPos.X + x, p.GridPos.Y + y}
				if other := taken[at]; other != "" {
					t.Fatalf("%s overlaps %s", p.Title, other)
				}
				taken[at] = p.Title
			}
		}
	}
}

// promtool fails the test if that program, which make promtool-test provides, finds a problem.
func promtool(t *testing.T, stdin string, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Getenv("PROMTOOL"), args...)
	cmd.Stdin = strings.NewReader(stdin)
	if out, err := cmd.CombinedOutput(); err != nil || strings.Contains(string(out), "lint") {
		t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

func needPromtool(t *testing.T) {
	t.Helper()
	if os.Getenv("PROMTOOL") == "" {
		t.Skip("runs promtool: make promtool-test")
	}
}

func TestPromtoolFindsNothingInTheAlerts(t *testing.T) {
	needPromtool(t)
	promtool(t, "", "check", "rules", "prometheus/rules.yaml")
	promtool(t, "", "test", "rules", "prometheus/rules_test.yaml")
}

func TestPromtoolParsesTheDashboardExpressions(t *testing.T) {
	needPromtool(t)
	var rules strings.Builder
	rules.WriteString("groups:\n- name: dashboard\n  rules:\n")
	variables := strings.NewReplacer("$__rate_interval", "5m", "$job", ".*", "$node", ".*")
	for i, p := range readDashboard(t).Panels {
		for j, target := range p.Targets {
			fmt.Fprintf(&rules, "  - record: panel:%d:%d\n    expr: %q\n", i, j, variables.Replace(target.Expr))
		}
	}
	file := filepath.Join(t.TempDir(), "dashboard.yaml")
	writeFile(t, file, rules.String())
	promtool(t, "", "check", "rules", file)
}

// The program runs on a node, with real connections.
func TestPromtoolFindsNothingInTheMetrics(t *testing.T) {
	needPromtool(t)
	n := node{Topology: nfttest.NewTopology(t), t: t}
	n.running = agent.Run(t, n.Node,
		exec.Command(agent.Program(t), "--http-address=127.0.0.1:9717", "--config="+t.TempDir()))
	n.await("config_applied")
	n.wantMasqueraded("198.51.100.1", true)
	code, text := n.get("/metrics")
	if code != http.StatusOK {
		t.Fatalf("status %d\n%s", code, text)
	}
	promtool(t, text, "check", "metrics")
}

package main

import (
	"strings"
	"testing"

	"nft-masq-agent/nft/nfttest"
)

func TestRunAndStatusReportUncoveredPods(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	n := newNode(t)
	n.swap(exempting("10.1.0.0/16"))
	d := n.start("--pod-cidr", "10.244.0.0/16,10.245.0.0/16")
	for _, want := range []string{"10.244.0.0/16", "10.245.0.0/16"} {
		line := d.await("pod_cidr_not_covered")
		if line["level"] != "warn" || !strings.Contains(line.Text("why"), "pod CIDR "+want+" is not exempted") {
			t.Errorf("%v, want %s", line, want)
		}
	}
	r, _ := n.status()
	if len(problems(r, "pod-cidr")) != 2 || !strings.Contains(r.Errors[0].Msg, "10.244.0.0/16") {
		t.Errorf("with the agent's flags: %q", r.Problems())
	}
	if r, _ := n.status("--pod-cidr=10.1.2.0/24"); len(problems(r, "pod-cidr")) != 0 {
		t.Errorf("of covered pods: %q", r.Problems())
	}
	if text := n.run("status").stdout; !strings.HasPrefix(text, "pod CIDR 10.244.0.0/16 is not exempted") {
		t.Errorf("status begins\n%s", text)
	}

	n.swap(exempting("10.244.0.0/15", "10.1.0.0/16"))
	d.await("config_applied")
	if r, _ := n.status(); len(problems(r, "pod-cidr")) != 0 {
		t.Errorf("after the change: %q", r.Problems())
	}
	n.swap(exempting("10.0.0.0/8") + "forceMasqueradeCIDRs: [10.245.7.0/24]\n")
	line := d.await("pod_cidr_not_covered")
	if why := line.Text("why"); !strings.HasPrefix(why, n.path+":") ||
		!strings.Contains(why, "reaches into pod CIDR 10.245.0.0/16") {
		t.Errorf("after the second change: %q", why)
	}
	if r, _ := n.status(); len(problems(r, "pod-cidr")) != 1 {
		t.Errorf("after the second change: %q", r.Problems())
	}
}

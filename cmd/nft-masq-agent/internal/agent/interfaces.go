package agent

import (
	"context"
	"slices"
	"sync/atomic"

	"go.uber.org/zap"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/nft"
)

// interfaces reports which interfaces of the config the node does not have. Their rules
// stay, because an interface may appear later.
type interfaces struct {
	*Agent
	policy    *nft.Ruleset
	absent    []nft.AbsentInterface
	unmatched atomic.Pointer[int] // lists that match nothing; nil: unknown
}

func (o *interfaces) run(ctx context.Context) {
	o.follow(ctx, func(v view, checked bool) {
		if v.installed != nil && (v.installed != o.policy || checked) {
			o.policy = v.installed
			o.look(v.installed.Policy)
		}
	})
}

// look logs what has changed.
func (o *interfaces) look(p nft.Policy) {
	all, err := o.in.Interfaces()
	if err != nil {
		o.logLine(zap.WarnLevel, "interfaces_unreadable", "cannot list the interfaces of this node", "error", err)
		return
	}
	absent, before := p.AbsentInterfaces(all), o.absent
	unmatched := answer.Interfaces(absent).Faults()
	n := len(unmatched)
	o.unmatched.Store(&n)
	if slices.Equal(absent, before) {
		return
	}
	o.absent = absent
	known := answer.Interfaces(before).Faults()
	for _, p := range unmatched {
		if !slices.Contains(known, p) {
			o.logLine(zap.WarnLevel, "interface_list_unmatched", "a list of interfaces matches nothing on this node", "why",
				p.Msg)
		}
	}
	for _, i := range absent {
		if !i.Only && !slices.Contains(before, i) {
			o.logLine(zap.WarnLevel, "interface_missing", "an interface of the config carries no packets on this node",
				"key", i.Key, "interface", i.Name, "place", i.Pos.String(),
				"part_of", i.Master)
		}
	}
	if len(absent) == 0 {
		o.logLine(zap.InfoLevel, "interfaces_found", "all interfaces of the config exist")
	}
}

func (o *interfaces) collect(e exporter) {
	if n := o.unmatched.Load(); n != nil {
		e.gauge("unmatched_interface_lists",
			"Lists of the config that match no interface that packets pass on this node, so that nothing is masqueraded.",
			float64(*n))
	}
}

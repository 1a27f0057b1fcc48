package observe

import (
	"context"
	"slices"
	"sync/atomic"

	"go.uber.org/zap"

	"nft-masq-agent/cmd/nft-masq-agent/internal/agent"
	"nft-masq-agent/cmd/nft-masq-agent/internal/health"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/routes"
)

// interfaces reports which interfaces of the config the node does not have. Their rules
// stay, because an interface may appear later.
type interfaces struct {
	*agent.Agent
	list      func() ([]routes.Interface, error)
	policy    *nft.Ruleset
	absent    []health.AbsentInterface
	unmatched atomic.Pointer[int] // lists that match nothing; nil: unknown
}

func (o *interfaces) Run(ctx context.Context) {
	o.Follow(ctx, func(v agent.View, checked bool) {
		if v.Installed != nil && (v.Installed != o.policy || checked) {
			o.policy = v.Installed
			o.look(v.Installed.Policy)
		}
	})
}

func (o *interfaces) look(p nft.Policy) {
	asked := slices.ContainsFunc(p.Families, func(f nft.FamilyPolicy) bool {
		return slices.ContainsFunc(f.Questions, func(q nft.Question) bool { return len(q.Interfaces) > 0 })
	})
	var all []routes.Interface
	var err error
	if asked {
		all, err = o.list()
	}
	if err != nil {
		o.Log(zap.WarnLevel, "interfaces_unreadable", "cannot list the interfaces of this node", "error", err)
		return
	}
	absent, before := health.AbsentInterfaces(p, all), o.absent
	unmatched := health.Interfaces(absent).Faults()
	n := len(unmatched)
	o.unmatched.Store(&n)
	if slices.Equal(absent, before) {
		return
	}
	o.absent = absent
	known := health.Interfaces(before).Faults()
	for _, p := range unmatched {
		if !slices.Contains(known, p) {
			o.Log(zap.WarnLevel, "interface_list_unmatched", "a list of interfaces matches nothing on this node", "why",
				p.Msg)
		}
	}
	for _, i := range absent {
		if !i.Only && !slices.Contains(before, i) {
			o.Log(zap.WarnLevel, "interface_missing", "an interface of the config carries no packets on this node",
				"key", i.Key, "interface", i.Name, "place", i.Pos.String(),
				"part_of", i.Master)
		}
	}
	if len(absent) == 0 {
		o.Log(zap.InfoLevel, "interfaces_found", "all interfaces of the config exist")
	}
}

func (o *interfaces) Collect(e agent.Exporter) {
	if n := o.unmatched.Load(); n != nil {
		e.Gauge("unmatched_interface_lists",
			"Lists of the config that match no interface that packets pass on this node, so that nothing is masqueraded.",
			float64(*n))
	}
}

package agent

import (
	"slices"

	"go.uber.org/zap"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
)

// checkInterfaces logs which interfaces of the config the node does not have, once until
// that changes. Their rules stay, because an interface may appear later.
func (a *Agent) checkInterfaces() {
	if a.policy.want == nil {
		return
	}
	all, err := a.in.Interfaces()
	if err != nil {
		a.log.Warn("cannot list the interfaces of this node", zap.String("event", "interfaces_unreadable"), zap.Error(err))
		return
	}
	absent, before := a.policy.want.Policy.AbsentInterfaces(all), a.absent
	unmatched := answer.Interfaces(absent).Faults()
	n := len(unmatched)
	a.health.set(func(s *state) { s.unmatched = &n })
	if slices.Equal(absent, before) {
		return
	}
	a.absent = absent
	known := answer.Interfaces(before).Faults()
	for _, p := range unmatched {
		if !slices.Contains(known, p) {
			a.log.Warn("a list of interfaces matches nothing on this node",
				zap.String("event", "interface_list_unmatched"), zap.String("why", p.Msg))
		}
	}
	for _, i := range absent {
		if !i.Only && !slices.Contains(before, i) {
			a.log.Warn("an interface of the config carries no packets on this node", zap.String("event", "interface_missing"),
				zap.String("key", i.Key), zap.String("interface", i.Name), zap.String("place", i.Pos.String()),
				zap.String("part_of", i.Master))
		}
	}
	if len(absent) == 0 {
		a.log.Info("all interfaces of the config exist", zap.String("event", "interfaces_found"))
	}
}

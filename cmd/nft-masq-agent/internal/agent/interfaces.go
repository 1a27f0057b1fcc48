package agent

import (
	"slices"

	"go.uber.org/zap"
)

// checkInterfaces logs which interfaces of the config the node does not have,
// once until that changes. Their rules stay, because an interface may appear
// later.
func (a *Agent) checkInterfaces() {
	if a.policy.want == nil {
		return
	}
	names, err := a.in.Interfaces()
	if err != nil {
		a.log.Warn("cannot list the interfaces of this node", zap.String("event", "interfaces_unreadable"), zap.Error(err))
		return
	}
	absent := a.policy.want.Policy.AbsentInterfaces(names)
	lists := map[string]bool{}
	for _, i := range absent {
		if i.Only {
			lists[i.Key] = true
		}
	}
	unmatched := len(lists)
	a.health.set(func(s *state) { s.unmatched = &unmatched })
	if slices.Equal(absent, a.absent) {
		return
	}
	for _, i := range absent {
		if slices.Contains(a.absent, i) {
			continue
		}
		message := "an interface of the config does not exist on this node"
		if i.Only {
			message = "no interface of a list exists on this node: nothing is masqueraded"
		}
		a.log.Warn(message, zap.String("event", "interface_missing"), zap.String("key", i.Key),
			zap.String("interface", i.Name), zap.String("place", i.Pos.String()))
	}
	if len(absent) == 0 {
		a.log.Info("all interfaces of the config exist", zap.String("event", "interfaces_found"))
	}
	a.absent = absent
}

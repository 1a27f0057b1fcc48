package nft

import "slices"

// EnforcePriority is the priority at which exemptions are enforced, before other
// programs translate. kindnet is the earliest, at srcnat - 10: of two chains with
// equal priority the one that was registered last runs first, and kindnet creates
// its chain again at each start and each change of a Node.
const EnforcePriority = SrcNAT - 20

// KnowsPods reports whether the policy identifies the sources that are pods.
func (f FamilyPolicy) KnowsPods() bool {
	return slices.ContainsFunc(f.Conditions, func(condition Condition) bool { return condition.LimitsSources() })
}

// Enforces reports whether exemptions of a family are enforced.
func (p Policy) Enforces(f FamilyPolicy) bool { return p.Enforce != nil && f.KnowsPods() }

// Drops reports whether invalid packets of a family are dropped.
func (p Policy) Drops(f FamilyPolicy) bool { return p.DropInvalid && f.KnowsPods() }

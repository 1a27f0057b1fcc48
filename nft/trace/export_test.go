package trace

// InNAT reports whether the rule is in a chain of type nat.
func (f Finding) InNAT() bool { return f.nat }

// AtDestination reports whether the rule is met before the packet's source can be translated.
func (f Finding) AtDestination() bool { return f.Priority == dstPriority }

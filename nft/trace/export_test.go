package trace

// AtDestination reports whether the rule is met before the packet's source can be translated.
func (f Finding) AtDestination() bool { return f.Priority == dstPriority }

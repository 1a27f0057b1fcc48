package nft

// Counts says how many connections went which way since the counters were created.
type Counts struct {
	IPv6    bool
	Verdict Verdict
	Packets uint64 // a counter of a nat chain counts connections
}

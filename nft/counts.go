package nft

// Counts is the number of connections of a family with a verdict, since the counters were created.
type Counts struct {
	IPv6    bool
	Verdict Verdict
	Packets uint64 // in a nat chain, a counter counts connections
}

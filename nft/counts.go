package nft

// Counts is the number of connections of a family with a verdict, or of packets that are
// [Invalid], since the counters were created.
type Counts struct {
	IPv6    bool
	Verdict Verdict
	Packets uint64 // in a nat chain, a counter counts connections
}

// Invalid stands for packets of pods that were dropped, because they belong to no
// connection.
const Invalid Verdict = "invalid"

package nftrace

import (
	"testing"
	"time"
)

// The answer is the packet that came first, and never one of which more may come.
func TestTheAnswerIsTheFirstPacketThatEnded(t *testing.T) {
	now := time.Now()
	long := now.Add(-2 * quiet)
	for name, tt := range map[string]struct {
		packets map[uint32]*packet
		over    bool
		want    uint32 // 0: none
	}{
		"the first of two": {
			packets: map[uint32]*packet{
				1: {new: true, began: now.Add(-time.Minute), last: long}, 2: {new: true, began: now.Add(-time.Hour), last: long},
				3: {dropped: true, began: now, last: now},
			},
			want: 2,
		},
		"one that goes on":                   {packets: map[uint32]*packet{1: {new: true, last: now}}},
		"one that goes on, and time is over": {packets: map[uint32]*packet{1: {new: true, last: now}}, over: true},
		"one that went no further": {
			packets: map[uint32]*packet{1: {new: true, last: now.Add(-2 * egressTime)}}, over: true, want: 1,
		},
		"one that arrived as time was over": {
			packets: map[uint32]*packet{1: {new: true, arrived: true, last: now}}, over: true, want: 1,
		},
		"one of a known connection": {packets: map[uint32]*packet{1: {last: long}}},
	} {
		for range 10 { // a map has no order
			got := answer(tt.packets, tt.over)
			if got != tt.packets[tt.want] {
				t.Errorf("%s: %+v", name, got)
			}
		}
	}
}

package nfttest

import "testing"

func TestConntrackDropsAreSummedOverCPUs(t *testing.T) {
	// As of Linux 6.18; the columns differ between versions.
	const text = `entries  clashres found new invalid ignore delete chainlength insert insert_failed drop early_drop icmp_error  expect_new expect_create expect_delete search_restart
00000003  00000000 00000000 00000000 00000001 00000000 00000000 00000004 00000000 00000000 0000000a 00000002 00000000  00000000 00000000 00000000 00000000
00000003  00000000 00000000 00000000 00000000 00000000 00000000 00000004 00000000 00000000 00000001 00000000 00000000  00000000 00000000 00000000 00000000
`
	if got, err := sum(text, "drop"); got != 11 || err != nil {
		t.Errorf("%d, %v, want 11", got, err)
	}
	for _, bad := range []string{"entries\n0\n", "entries drop\n0\n", "entries drop\n0 x\n"} {
		if got, err := sum(bad, "drop"); err == nil {
			t.Errorf("%q: %d and no error", bad, got)
		}
	}
}

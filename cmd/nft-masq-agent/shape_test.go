package main

import (
	"io"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/nft/nfttest"
)

func TestTextIsWrappedOnlyOnATerminal(t *testing.T) {
	args := []string{"explain", "10.1.2.3"}
	texts := map[bool]string{}
	onNode(t, func() {
		for _, terminal := range []bool{false, true} {
			var stdout strings.Builder
			e := testEnvironment(t, &stdout, io.Discard)
			e.fit = terminal
			dispatch(t.Context(), commands(), args, e)
			texts[terminal] = stdout.String()
		}
	})
	want := cli.Fit(texts[false])
	if diff := cmp.Diff(want, texts[true]); diff != "" || want == texts[false] {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A terminal is /dev/ptmx, the end of one that a program such as sshd holds.
func TestEnvironmentKnowsItsTerminalsAndWhoTypes(t *testing.T) {
	defer func(out, err *os.File) { os.Stdout, os.Stderr = out, err }(os.Stdout, os.Stderr)
	for i := range 8 {
		is := func(bit int) bool { return i>>bit&1 == 1 }
		stdout, stderr, pod := is(0), is(1), is(2)
		for file, terminal := range map[**os.File]bool{&os.Stdout: stdout, &os.Stderr: stderr} {
			name := map[bool]string{true: "/dev/ptmx", false: os.DevNull}[terminal]
			*file = nfttest.Must(os.OpenFile(name, os.O_RDWR|unix.O_NOCTTY, 0))
			defer (*file).Close()
		}
		t.Setenv("KUBERNETES_SERVICE_HOST", strings.Repeat("1", i>>2))
		e := theEnvironment()
		got := [2]bool{e.fit, e.person}
		if want := [2]bool{stdout, stdout && stderr && !pod}; got != want {
			t.Errorf("stdout %t, stderr %t, pod %t: %v, want %v", stdout, stderr, pod, got, want)
		}
	}
}

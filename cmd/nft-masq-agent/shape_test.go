package main

import (
	"flag"
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

// toys are commands for all forms of the help: the second one has the longest list of shared flags.
func toys() []command {
	of := func(name, operands, details, mode string, examples ...string) command {
		return command{name, operands, name + " it", details, examples, false, func(fs *flag.FlagSet) action {
			if name != "play" {
				fs.String("probe-socket", "", "`PATH` of its socket")
			}
			if name != "drop" {
				fs.String("config", "/etc/toy", "`PATH` of the toy's box")
				fs.Int("v", 0, "log `LEVEL`")
				fs.Bool("logtostderr", true, "of klog")
				fs.Bool("wild", false, `it's "wild"`)
				fs.String("mode", mode, "MODE")
				addOutput(fs, new(string))
			}
			return nil
		}}
	}
	return []command{
		of("play", "[TOY]", `It's .5 \ "x".`, "", program+" play a", program+" play b"),
		of("run", "", "", "slow", program+" run"), of("drop", "TOY", "", "", program+" drop a"),
	}
}

func TestFormsOfTheHelpAreTheGoldenOnes(t *testing.T) {
	const path = "../../testdata/forms.txt"
	all := toys()
	got := "== program\n" + programHelp(all)
	for _, c := range all {
		got += "== " + c.name + "\n" + c.help()
	}
	if *update {
		nfttest.Check(os.WriteFile(path, []byte(got), 0o644))
	}
	if diff := cmp.Diff(string(nfttest.Must(os.ReadFile(path))), got); diff != "" {
		t.Errorf("make golden (-want +got):\n%s", diff)
	}
}

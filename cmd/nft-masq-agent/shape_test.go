package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/reply"
	"nft-masq-agent/nft/nfttest"
)

func TestWatchAnswersUntilItIsInterrupted(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t) // an answer every two seconds
	n := newNode(t)
	d := n.start()
	d.began(wants(t, ""))
	for _, name := range []string{"status", "connections"} {
		cmd := n.command(nil, name, "--watch", "-o", "json")
		out, err := cmd.StdoutPipe()
		n.check(err)
		n.check(n.Do(cmd.Start))
		lines := bufio.NewScanner(out)
		for range 2 {
			var head reply.Head
			if !lines.Scan() || json.Unmarshal(lines.Bytes(), &head) != nil || head.Command != name {
				t.Fatalf("%s: %q: %v", name, lines.Text(), lines.Err())
			}
		}
		n.check(cmd.Process.Signal(unix.SIGINT))
		n.check(cmd.Wait())
	}
	if got := n.run("connections", "--watch", "--flush"); got.code != exitUsage {
		t.Errorf("%+v", got)
	}
}

func TestColorsChangeOnlyTheFirstLineAndTheStateOfAreas(t *testing.T) {
	text := "in sync: ok\n\nagent           ok     runs\nother programs  wrong  ok \nok\n"
	want := "\x1b[1min sync: ok\x1b[0m\n\nagent           \x1b[32mok\x1b[0m     runs\n" +
		"other programs  \x1b[31mwrong\x1b[0m  ok \nok\n"
	if got := reply.Color(text); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestCompletionKnowsCommandsFlagsAndFiles(t *testing.T) {
	nfttest.Require(t, "bash")
	script := runHere(t, "completion", "bash").stdout
	for words, want := range map[string]string{
		"nft-masq-agent stat": "status", "nft-masq-agent status --watc": "--watch",
		"nft-masq-agent check ./shape_t": "./shape_test.go",
		"nft-masq-agent diff --enab":     "--enable-ipv6",
	} {
		list := strings.Fields(words)
		line := fmt.Sprintf("%s\nCOMP_WORDS=(%s) COMP_CWORD=%d; _nft_masq_agent; echo \"${COMPREPLY[@]}\"", script, words,
			len(list)-1)
		if got := nfttest.Run(t, nfttest.NewNS(t, "shell"), "", "bash", "-c", line); strings.TrimSpace(got) != want {
			t.Errorf("%s: %q, want %q", words, got, want)
		}
	}
	for _, shell := range []string{"bash", "zsh", "fish"} {
		script := runHere(t, "completion", shell).stdout
		for _, c := range commands() {
			flagsOf(c, func(f *flag.Flag) {
				if !strings.Contains(script, f.Name) || !strings.Contains(script, c.name) {
					t.Errorf("%s: %s --%s", shell, c.name, f.Name)
				}
			})
		}
	}
	if got := runHere(t, "completion", "tcsh"); got.code != exitUsage {
		t.Errorf("%+v", got)
	}
}

func TestManualPageHasTheTextsOfTheHelp(t *testing.T) {
	nfttest.Require(t, "groff")
	page := runHere(t, "man").stdout
	shell := nfttest.NewNS(t, "shell")
	if faults := nfttest.Run(t, shell, page, "sh", "-c", "groff -man -Tutf8 -ww 2>&1 >/dev/null"); faults != "" {
		t.Error(faults)
	}
	text := nfttest.Run(t, shell, page, "sh", "-c", "groff -man -Tutf8 -P-cbou -rLL=9999n")
	text = strings.Join(strings.Fields(strings.ReplaceAll(text, "\u2019", "'")), " ")
	for _, c := range commands() {
		want := append([]string{c.about[1:], strings.Join(strings.Fields(c.details), " ")}, c.examples...)
		flagsOf(c, func(f *flag.Flag) { want = append(want, "--"+f.Name) })
		for _, w := range want {
			if !strings.Contains(text, w) {
				t.Errorf("%s: %q is missing", c.name, w)
			}
		}
	}
}

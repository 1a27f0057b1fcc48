package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/nft/nfttest"
)

// flagLines are lines that README.md leaves out.
var flagLines = regexp.MustCompile(`(?m)^(\nNotes:\n)? *with the flags of the running agent .*\n`)

const prompt = "$ " + program + " "

// leftOut is the CIDR that is missing in the proposed file next to the config.
const leftOut = ", 192.168.0.0/16"

// The examples in README.md are the output of the commands on a node whose agent
// has the first YAML of README.md as its config, and whose pod has opened a
// connection. Line breaks may differ: README.md is as wide as a terminal.
func TestReadmeShowsWhatTheCommandsPrint(t *testing.T) {
	t.Parallel()
	const name = "README.md"
	document := readDocument(t, name)
	text := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindStringSubmatch(document)
	block := regexp.MustCompile("(?s)```console\n(.*?)```").FindStringSubmatch(document)
	if text == nil || block == nil {
		t.Fatal(name + " has no config or no example")
	}

	n := newTrafficNode(t)
	n.write(text[1])
	n.check(os.WriteFile(filepath.Join(filepath.Dir(n.path), "proposed"), []byte(strings.Replace(text[1], leftOut, "", 1)),
		0o644))
	d := n.startCommand(n.command(nil, "run", "--config", n.path, "--probe-socket", n.socket))
	d.began(wants(t, text[1]))
	n.open(nfttest.TCP, "203.0.113.9:443")

	var printed strings.Builder
	for line := range strings.Lines(block[1]) {
		if args, ok := strings.CutPrefix(line, prompt); ok {
			cmd := n.command(nil, strings.Fields(args)...)
			cmd.Dir = filepath.Dir(n.path)
			var out strings.Builder
			cmd.Stdout, cmd.Stderr = &out, &out
			_ = n.NS.Run(cmd) // diff ends with 1
			if printed.Len() > 0 {
				printed.WriteString("\n")
			}
			printed.WriteString(line + strings.TrimRight(general(flagLines.ReplaceAllString(out.String(), ""), cmd.Dir),
				"\n") + "\n")
		}
	}
	if *update && cmp.Diff(words(block[1]), words(printed.String())) != "" {
		n.check(os.WriteFile(filepath.Join(root, name), []byte(strings.Replace(document, block[1], printed.String(), 1)),
			0o644))
		return
	}
	if diff := cmp.Diff(words(printed.String()), words(general(block[1], "/etc/config"))); diff != "" {
		t.Errorf("examples in %s (-printed +shown), make golden renews them:\n%s", name, diff)
	}
}

// general replaces what differs each time: the directory, times, PIDs, ports chosen by
// the kernel, and seconds.
func general(text, dir string) string {
	text = strings.ReplaceAll(text, dir+"/", "/etc/config/")
	text = regexp.MustCompile(`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ`).ReplaceAllString(text, "2026-01-02T03:04:05Z")
	text = regexp.MustCompile(`\bpid \d+`).ReplaceAllString(text, "pid 1")
	text = regexp.MustCompile(`:[1-9]\d{3,4}\b`).ReplaceAllString(text, ":40000")
	return regexp.MustCompile(`\b\d+s\b`).ReplaceAllString(text, "120s")
}

func words(text string) []string { return strings.Fields(text) }

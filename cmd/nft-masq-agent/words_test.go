package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// A wording is one that users should not meet, and what to write instead.
type wording struct {
	pattern string
	instead string
	right   []string // where it is the right word
}

func wordings() []wording {
	return []wording{
		{`\bin step\b`, "in sync", nil},
		{`\b(put|puts|putting) (it |them |the rules |its rules |ours )?back\b|\bundo(es|ne)?\b|\bundid\b`, "restore, revert", nil},
		{`\bbrought to\b`, "restored, changed to", nil},
		{`\b(hold|holds|held) \S+( \S+){0,3} against\b|\bheld against\b`, "compare", nil},
		{`\bdefaults hold\b`, "built-in defaults apply", nil},
		{`\blooks? (at|for|now|again)\b|\blooked (at|for)\b|\blooks\b`, "check, compare", []string{"look the same"}},
		{`\bwhere\b`, "if, when", []string{
			"masquerading where you want", "where pod IPs are", "where no agent runs", "where other kernels", "where the kubelet probes",
		}},
		{`\b(gives?|gave)\b`, "return, report", nil},
		{`\b(says?|said|tells?|told)\b`, "report, log, warn", []string{"if any file says"}},
		{`\bbeside\b`, "next to", nil},
		{`\bbehind\b`, "after", []string{"who is behind", "pod behind", "leaves its rules behind"}},
		{`\bnot of the config\b`, "not in the config", nil},
		{`\brules? (or map )?of others\b|\bothers'|\bother's\b|\bothers (do|did|write|wrote|have|had|commit)\b`, "other programs' rules", nil},
		{`\b(somebody|someone|anybody|nobody)\b`, "another program, you", []string{"Anybody who can reach the node"}},
		{`\bis no [a-z]`, "is not a", nil},
		{`\bmend(s|ed)?\b`, "fix", nil},
		{`\blook again\b|\btry again\b|\btried again\b|\btries again\b`, "re-check, retry", nil},
		{`\bwhatever (its|their) case\b`, "case-insensitive", nil},
		{`\bslips?\b`, "mistake", nil},
		{`\bodd\b`, "unexpected", nil},
		{`\btried\b`, "supported, tested", nil},
		{`\breach(es)?: |\bholds? \|`, "target: met, missed", nil},
		{`\ba change is for\b|\bkeeps the address it has\b`, "existing connections keep their address", nil},
	}
}

// userTexts returns what users read, by where it is: documents without code, help,
// the descriptions of metrics, errors of the config, and what the commands answer
// in the transcripts.
func userTexts(t *testing.T) map[string]string {
	t.Helper()
	texts := map[string]string{}
	code := regexp.MustCompile("(?s)```.*?```|`[^`\n]*`|\\]\\([^)]*\\)|\\n    [^\n]*")
	for _, d := range documents(t) {
		texts[d] = code.ReplaceAllString(readDocument(t, d), " … ")
	}
	for _, c := range commands() {
		var stdout bytes.Buffer
		if code := help(commands(), []string{c.name}, testEnvironment(t, &stdout, &stdout)); code != exitDone {
			t.Fatalf("help %s: %s", c.name, &stdout)
		}
		texts["help "+c.name] = stdout.String()
	}
	texts["help"] = programHelp(commands())
	for _, source := range []string{"metrics.go", "ports.go"} {
		literals := regexp.MustCompile(`"[^"\n]* [^"\n]*"`).FindAllString(readDocument(t, "cmd/nft-masq-agent/internal/agent/"+source), -1)
		if len(literals) < 5 {
			t.Fatalf("%s describes no metrics", source)
		}
		texts[source] = strings.Join(literals, " ")
	}
	for pattern, part := range map[string]*regexp.Regexp{
		cliDir + "/*.txt":                   regexp.MustCompile(`(?m)^-- (file|run) .*$`),
		root + "/testdata/config/bad/*.err": regexp.MustCompile(`\S+:\d+:\d+`),
	} {
		paths, err := filepath.Glob(pattern)
		if err != nil || len(paths) == 0 {
			t.Fatal(pattern, err)
		}
		for _, path := range paths {
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			texts[filepath.Base(path)] = part.ReplaceAllString(string(text), " … ")
		}
	}
	return texts
}

func TestUsersReadPlainTechnicalEnglish(t *testing.T) {
	texts := userTexts(t)
	all := ""
	for place, text := range texts {
		texts[place] = strings.Join(strings.Fields(text), " ")
		all += texts[place]
	}
	for _, w := range wordings() {
		pattern := regexp.MustCompile(w.pattern)
		for _, r := range w.right {
			if !strings.Contains(all, r) {
				t.Errorf("%q is an exception that nothing uses", r)
			}
		}
		for place, text := range texts {
			for _, r := range w.right {
				text = strings.ReplaceAll(text, r, "")
			}
			for _, at := range pattern.FindAllStringIndex(text, -1) {
				t.Errorf("%s: …%s…: write %s", place, text[max(0, at[0]-60):min(len(text), at[1]+40)], w.instead)
			}
		}
	}
}

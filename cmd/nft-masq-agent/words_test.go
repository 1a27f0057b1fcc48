package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// A wording is one that texts should not have, and what to write instead.
type wording struct {
	pattern string
	instead string
	right   []string // phrases in which it is the right word
	inCode  []string // further ones in comments and messages
}

func wordings() []wording {
	return []wording{
		{pattern: `\bin step\b`, instead: "in sync"},
		{pattern: `\b(put|puts|putting) (it |them |the rules |its rules |ours )?back\b|\bundo(es|ne)?\b|\bundid\b`, instead: "restore, revert"},
		{pattern: `\bbrought to\b`, instead: "restored, changed to"},
		{pattern: `\b(hold|holds|held) \S+( \S+){0,3} against\b|\bheld against\b`, instead: "compare"},
		{pattern: `\bdefaults hold\b`, instead: "built-in defaults apply"},
		{pattern: `\blooks? (at|for|now|again)\b|\blooked (at|for)\b|\blooks\b`, instead: "check, compare", right: []string{"look the same"}, inCode: []string{"looks like", "looks up", "looks for comments"}},
		{pattern: `\bwhere\b`, instead: "if, when", right: []string{
			"masquerading where you want", "where pod IPs are", "where no agent runs", "where other kernels", "where the kubelet probes",
		}, inCode: []string{"ip_tables, where --takeover", "from | where | ,", "ip6t_entry: where the offsets", "and where the matches begin"}},
		{pattern: `\b(gives?|gave)\b`, instead: "return, report", inCode: []string{"gives a device an address", "gives the outside host one address", "gives one of the three hosts"}},
		{pattern: `\b(says?|said|tells?|told)\b`, instead: "report, log, warn", right: []string{"if any file says"}},
		{pattern: `\bbeside\b`, instead: "next to"},
		{pattern: `\bbehind\b`, instead: "after", right: []string{"who is behind", "leaves its rules behind"}, inCode: []string{"left behind"}},
		{pattern: `\bnot of the config\b`, instead: "not in the config"},
		{pattern: `\brules? (or map )?of others\b|\bothers'|\bother's\b|\bothers (do|did|write|wrote|have|had|commit)\b`, instead: "other programs' rules"},
		{pattern: `\b(somebody|someone|anybody|nobody)\b`, instead: "another program, you", right: []string{"Anybody who can reach the node"}},
		{pattern: `\bis no [a-z]`, instead: "is not a", inCode: []string{"here is no "}},
		{pattern: `\bmend(s|ed)?\b`, instead: "fix"},
		{pattern: `\blook again\b|\btry(ing)? again\b|\btried again\b|\btries again\b`, instead: "re-check, retry"},
		{pattern: `\bwhatever (its|their) case\b`, instead: "case-insensitive"},
		{pattern: `\bslips?\b`, instead: "mistake"},
		{pattern: `\bodd\b`, instead: "unexpected"},
		{pattern: `\btried\b`, instead: "supported, tested"},
		{pattern: `\breach(es)?: |\bholds? \|`, instead: "target: met, missed"},
		{pattern: `\ba change is for\b|\bkeeps the address it has\b`, instead: "existing connections keep their address"},
	}
}

// userTexts returns what users read, by location: documents without code, help,
// the descriptions of metrics, errors of the config, and the output of commands
// in the transcripts.
func userTexts(t *testing.T) map[string]string {
	t.Helper()
	texts := map[string]string{}
	code := regexp.MustCompile("(?s)```.*?```|`[^`\n]*`|\\]\\([^)]*\\)|\\n    [^\n]*")
	for _, d := range documents(t) {
		texts[d] = code.ReplaceAllString(readDocument(t, d), " … ")
	}
	for _, c := range commands() {
		texts["help "+c.name] = c.help()
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

// commentWordings are the wordings that comments and messages should not have.
// Their exceptions are separate.
func commentWordings() []wording {
	unwanted := append(wordings(), []wording{
		{pattern: `\banew\b`, instead: "again"},
		{pattern: `\b(put|puts) back\b`, instead: "restore"},
		{pattern: `\bwhatever (its|their)\b`, instead: "in any"},
	}...)
	for i := range unwanted {
		unwanted[i].right = unwanted[i].inCode
	}
	return unwanted
}

func TestUsersReadPlainTechnicalEnglish(t *testing.T) {
	checkWording(t, userTexts(t), wordings())
}

// checkWording finds unwanted wordings in texts, by location. An exception that
// no text needs is an error.
func checkWording(t *testing.T, texts map[string]string, unwanted []wording) {
	t.Helper()
	all := ""
	for place, text := range texts {
		texts[place] = strings.Join(strings.Fields(text), " ")
		all += texts[place] + "\n"
	}
	for _, w := range unwanted {
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

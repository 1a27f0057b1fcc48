package main

import (
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/cmd/nft-masq-agent/internal/health"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
)

const root = "../.." // of the repository

// documents lists the Markdown files of the repository.
func documents(t *testing.T) []string {
	t.Helper()
	return files(t, func(path string) bool { return filepath.Ext(path) == ".md" })
}

// scripts lists the files of the repository that run tests by name.
func scripts(t *testing.T) []string {
	t.Helper()
	return files(t, func(path string) bool {
		return path == "Makefile" || filepath.Ext(path) == ".mk" || filepath.Ext(path) == ".sh" ||
			strings.HasPrefix(path, ".ci/")
	})
}

func files(t *testing.T, match func(path string) bool) []string {
	t.Helper()
	var all []string
	err := fs.WalkDir(os.DirFS(root), ".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (path == "bin" || path == ".git"):
			return fs.SkipDir
		case !d.IsDir() && match(path):
			all = append(all, path)
		}
		return nil
	})
	nfttest.NoError(t, err)
	return all
}

func readDocument(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, name))
	nfttest.NoError(t, err)
	return string(text)
}

// section returns the text between <!-- name --> and <!-- /name -->, which must
// exist once in all documents.
func section(t *testing.T, name string) string {
	t.Helper()
	var all []string
	for _, d := range documents(t) {
		_, after, found := strings.Cut(readDocument(t, d), "<!-- "+name+" -->")
		if !found {
			continue
		}
		text, _, ended := strings.Cut(after, "<!-- /"+name+" -->")
		if !ended {
			t.Fatalf("%s: section %q does not end", d, name)
		}
		all = append(all, text)
	}
	if len(all) != 1 {
		t.Fatalf("%d sections %q", len(all), name)
	}
	return all[0]
}

// firstColumn returns the code at the beginning of each row of a table.
func firstColumn(table string) []string {
	var out []string
	for _, m := range regexp.MustCompile("(?m)^\\| `(-*[A-Za-z0-9-]+)").FindAllStringSubmatch(table, -1) {
		out = append(out, strings.TrimLeft(m[1], "-"))
	}
	return out
}

func TestDocumentsShowTheListingsOfTheCases(t *testing.T) {
	listings := 0
	for _, d := range documents(t) {
		listing := regexp.MustCompile("(?s)<!-- listing: (\\S+) -->\n```\n(.*?)```")
		for _, m := range listing.FindAllStringSubmatch(readDocument(t, d), -1) {
			listings++
			// Documents omit the lines that replace the table.
			want := readDocument(t, m[1])
			if _, table, ok := strings.Cut(want, "delete table inet nft-masq-agent\n"); ok {
				want = table
			}
			if diff := cmp.Diff(want, m[2]); diff != "" {
				t.Errorf("%s: %s (-want +got):\n%s", d, m[1], diff)
			}
		}
	}
	if listings == 0 {
		t.Error("no document shows a listing of nft: is the pattern of this test still theirs?")
	}
}

func TestYAMLInDocumentsIsValid(t *testing.T) {
	configs := 0
	for _, d := range documents(t) {
		for _, m := range regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(readDocument(t, d), -1) {
			if strings.Contains(m[1], "apiVersion:") || strings.HasPrefix(m[1], "affinity:") {
				continue // Kubernetes' or Helm's, not ours
			}
			configs++
			if _, problems := config.Parse(config.Defaults{}, config.Source{Name: d, Data: []byte(m[1])}); len(problems) > 0 {
				t.Errorf("%v\n%s", problems, m[1])
			}
		}
	}
	if configs == 0 {
		t.Error("no YAML")
	}
}

func TestDocumentsListTheKeys(t *testing.T) {
	want, got := config.Keys(), firstColumn(section(t, "keys"))
	slices.Sort(want)
	slices.Sort(got)
	nfttest.Same(t, "keys (-program +config/README.md)", want, got)
}

// A script that runs a test by a name, or by the beginning of one, that no test has runs nothing, and passes.
func TestNamedTestsExist(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "grep", "-rhoE", "--include=*_test.go", `^func Test[A-Za-z0-9]+\(`,
		root).Output()
	nfttest.NoError(t, err)
	exist := string(out)
	named := func(names *regexp.Regexp, files []string, after string) {
		found := 0
		for _, file := range files {
			for _, m := range names.FindAllStringSubmatch(readDocument(t, file), -1) {
				found++
				if !strings.Contains(exist, "func "+m[1]+after) {
					t.Errorf("%s: there is no test %s", file, m[1])
				}
			}
		}
		if found == 0 {
			t.Errorf("%s names no test in %q", names, files)
		}
	}
	named(regexp.MustCompile("`(Test[A-Za-z0-9]+)`"), documents(t), "(")
	named(regexp.MustCompile(`(?m)(?:^|[^.\w])(Test[A-Z]\w+)`), scripts(t), "")
}

func TestDocumentsListTheDirectDependencies(t *testing.T) {
	listed := section(t, "dependencies")
	for _, m := range regexp.MustCompile(`(?m)^\t(\S+) v\S+$`).FindAllStringSubmatch(readDocument(t, "go.mod"), -1) {
		if !strings.Contains(listed, "`"+m[1]+"`") {
			t.Errorf("%s is not in the documents", m[1])
		}
	}
}

// anchors returns the anchors of a document, as GitHub creates them.
func anchors(text string) []string {
	var all []string
	for _, m := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(text, -1) {
		plain := regexp.MustCompile(`[^\p{L}\p{N} _-]`).ReplaceAllString(strings.ToLower(m[1]), "")
		all = append(all, strings.ReplaceAll(plain, " ", "-"))
	}
	for _, m := range regexp.MustCompile(`<a id="([^"]+)">`).FindAllStringSubmatch(text, -1) {
		all = append(all, m[1])
	}
	return all
}

func TestLinksInDocumentsAreValid(t *testing.T) {
	for _, d := range documents(t) {
		for _, m := range regexp.MustCompile(`\]\(([^)]+)\)`).FindAllStringSubmatch(readDocument(t, d), -1) {
			if strings.HasPrefix(m[1], "https://") {
				continue
			}
			path, anchor, _ := strings.Cut(m[1], "#")
			target := d
			if path != "" {
				target = filepath.Join(filepath.Dir(d), path)
			}
			if _, err := os.Stat(filepath.Join(root, target)); err != nil {
				t.Errorf("%s: %s: %v", d, m[1], err)
			} else if anchor != "" && !slices.Contains(anchors(readDocument(t, target)), anchor) {
				t.Errorf("%s: %s: no such section", d, m[1])
			}
		}
	}
}

func TestPoliciesInTheDocumentsAreValid(t *testing.T) {
	policies := 0
	_, table, _ := strings.Cut(readDocument(t, "config/README.md"), "## Policies people ask for")
	table, _, _ = strings.Cut(table, "\n## ")
	policy := regexp.MustCompile("`([A-Za-z]+CIDRs|[A-Za-z]+Interfaces|[A-Za-z]+Addresses|masq[A-Za-z]+): [^`]+`")
	for _, m := range policy.FindAllString(table, -1) {
		policies++
		text := strings.Trim(m, "`")
		if _, problems := config.Parse(config.Defaults{},
			config.Source{Name: "config/README.md", Data: []byte(text)}); len(problems) > 0 {
			t.Errorf("%s: %v", text, problems)
		}
	}
	if policies < 5 {
		t.Errorf("config/README.md has %d policies that this test knows, want at least 5", policies)
	}
}

// The table of policies in config/README.md has what the far end saw. Interfaces are named as
// those of the test are, another program masquerades what is exempt, and the node has
// the fixed address.
func TestPoliciesInTheDocumentsShowTheFarEndsView(t *testing.T) {
	t.Parallel()
	nfttest.Require(t, "nft")
	_, table, _ := strings.Cut(readDocument(t, "config/README.md"), "## Policies people ask for")
	table, _, _ = strings.Cut(table, "\n## ")
	n := newTrafficNode(t)
	n.assign("198.51.100.11")
	n.assign("198.51.100.21")
	seen, sources := 0, ""
	for row := range strings.Lines(table) {
		cells := strings.Split(row, " | ")
		if len(cells) != 3 || !strings.Contains(cells[2], "→") {
			continue
		}
		foreign := ""
		for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(cells[1], -1) {
			text := strings.ReplaceAll(m[1], "cni0", "pod0") + "\n"
			switch {
			case strings.HasPrefix(text, config.KeyMasqueradeSrcCIDRs):
				sources = text
			case strings.HasPrefix(text, config.KeyEnforceNonMasquerade):
				text += sources
				foreign = "table inet cni { chain c { type nat hook postrouting priority 100; ip saddr 10.244.0.0/16 " +
					"masquerade; }; }"
			}
			want := wants(t, text).WithAddresses(cases.Addrs("198.51.100.11", "198.51.100.21"))
			k := n.kernel()
			_, err := k.Apply(t.Context(), want, nft.Contents)
			n.check(errors.Join(err, k.Close()))
			if foreign != "" {
				nfttest.NFT(t, n.top.Node, foreign, "-f", "-")
			}
			for _, view := range strings.Split(strings.Trim(cells[2], " |\n"), "; ") {
				dst, claims, _ := strings.Cut(view, ": ")
				for _, claim := range strings.Split(claims, ", ") {
					from, as, _ := strings.Cut(claim, " → ")
					n.sees(text, dst, from, as, uint16(6000+seen))
					seen++
				}
			}
			if foreign != "" {
				nfttest.NFT(t, n.top.Node, "", "delete", "table", "inet", "cni")
			}
		}
	}
	if seen < 9 {
		t.Errorf("%d addresses of the documents were compared with the far end's, want at least 9", seen)
	}
}

// sees compares how a destination sees a source, with a port if one is given.
func (n trafficNode) sees(policy, dst, from, as string, port uint16) {
	n.t.Helper()
	src, err := netip.ParseAddrPort(from)
	if err != nil {
		src = netip.AddrPortFrom(netip.MustParseAddr(from), 0)
	}
	flow := nfttest.Flow{
		Proto: nfttest.UDP, From: n.top.Pod, Src: src,
		Dst: netip.AddrPortFrom(netip.MustParseAddr(dst), port),
	}
	if src.Addr() == n.top.NodeV4 {
		flow.From = n.top.Node
	}
	got := nfttest.MustSend(n.t, n.top, flow).Seen
	if text := map[bool]string{true: got.Addr().String(), false: got.String()}[src.Port() == 0]; text != as {
		n.t.Errorf("%s: %s sees %s as %s, the document has %s", strings.TrimSpace(policy), dst, from, text, as)
	}
}

func TestReadmeListsTheProblems(t *testing.T) {
	text, ids := readDocument(t, "cmd/nft-masq-agent/README.md"), map[string]bool{}
	const id = `"([a-z]+(?:-[a-z]+)*)"`
	pattern := regexp.MustCompile(`(?:config\.(?:Error|Warning|Note), |warn\()` + id + `|` + id + `,\s+"[A-Z]`)
	for _, id := range append(slices.Clone(health.IDs), health.Unchecked, health.PodsNotExempt,
		health.Everything) {
		ids[id] = true
	}
	for _, dir := range []string{".", "internal/answer"} {
		files, err := filepath.Glob(filepath.Join(dir, "*.go"))
		nfttest.NoError(t, err)
		for _, name := range files {
			source, err := os.ReadFile(name)
			nfttest.NoError(t, err)
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			for _, m := range pattern.FindAllStringSubmatch(string(source), -1) {
				ids[m[1]+m[2]] = true
			}
		}
	}
	for id := range ids {
		if !strings.Contains(text, "`"+id+"`") {
			t.Errorf("the README has no problem %s", id)
		}
	}
	if len(ids) < 30 {
		t.Errorf("%d problems", len(ids))
	}
}

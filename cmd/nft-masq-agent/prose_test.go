package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"unicode"
)

// A prose is the text of a source file that people read: comments, names of tests,
// and, in programs, messages.
type prose struct {
	path  string
	text  string
	names []string // identifiers
}

// sources returns the prose of all source files: Go, scripts, make and YAML.
func sources(t *testing.T) []prose {
	t.Helper()
	var all []prose
	err := fs.WalkDir(os.DirFS(root), ".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (path == "bin" || path == ".git"):
			return fs.SkipDir
		case strings.HasSuffix(path, ".go"):
			all = append(all, goProse(t, path))
		case !d.IsDir() && (filepath.Ext(path) == ".mk" || filepath.Ext(path) == ".yaml" || path == "Makefile" || under(path, ".ci") || under(path, "testdata/watch")):
			comments := regexp.MustCompile(`(?m)^\s*# (.*)$`).FindAllStringSubmatch(readDocument(t, path), -1)
			var lines []string
			for _, c := range comments {
				lines = append(lines, c[1])
			}
			all = append(all, prose{path: path, text: strings.Join(lines, " ")})
		}
		return nil
	})
	if err != nil || len(all) < 50 {
		t.Fatalf("%d source files: %v", len(all), err)
	}
	return all
}

func goProse(t *testing.T, path string) prose {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, path), nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	p := prose{path: path}
	var texts []string
	for _, group := range file.Comments {
		texts = append(texts, group.Text())
	}
	test := strings.HasSuffix(path, "_test.go")
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.Ident:
			p.names = append(p.names, n.Name)
		case *ast.FuncDecl:
			if test && strings.HasPrefix(n.Name.Name, "Test") {
				texts = append(texts, sentence(n.Name.Name))
			}
		case *ast.BasicLit:
			if text, err := strconv.Unquote(n.Value); err == nil && !test && n.Kind == token.STRING && strings.Contains(text, " ") {
				texts = append(texts, text)
			}
		}
		return true
	})
	p.text = strings.Join(texts, " | ")
	return p
}

// sentence splits a name into lower-case words.
func sentence(name string) string {
	var b strings.Builder
	for _, r := range name {
		if unicode.IsUpper(r) {
			b.WriteByte(' ')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}

func TestCommentsAndMessagesAreInPlainTechnicalEnglish(t *testing.T) {
	texts := map[string]string{}
	for _, p := range sources(t) {
		if filepath.Base(p.path) != "words_test.go" {
			texts[p.path] = p.text
		}
	}
	checkWording(t, texts, commentWordings())
}

func TestNamesAreThoseOfTheField(t *testing.T) {
	instead := map[string]string{
		"inVain": "fruitless, idle", "owed": "pending", "unsaid": "pending", "said": "reported", "doomed": "toDelete",
		"Strange": "Unrecognized", "strange": "unrecognized", "deaf": "unsubscribed", "litter": "relaxGC", "tempo": "timing",
		"sight": "snapshot", "looker": "poller", "odd": "unexpected", "patience": "timeout",
	}
	for _, p := range sources(t) {
		for _, name := range p.names {
			if better := instead[name]; better != "" {
				t.Errorf("%s: the name %s: write %s", p.path, name, better)
			}
		}
	}
}

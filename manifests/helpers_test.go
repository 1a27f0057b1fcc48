package manifests_test

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func readFile(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	must(t, err)
	return string(text)
}

// writeFile writes a file, which may be a program.
func writeFile(t *testing.T, file, text string) {
	t.Helper()
	must(t, os.WriteFile(file, []byte(text), 0o700))
}

func readYAML(t *testing.T, file string, into any) {
	t.Helper()
	if err := yaml.Unmarshal([]byte(readFile(t, file)), into); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
}

// try runs a command line at the root of the repository, as a reader would, with more variables. It returns what
// the line prints, and if it fails, also its messages.
func try(t *testing.T, line string, env ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "bash", "-eo", "pipefail", "-c", line)
	cmd.Dir, cmd.Env = "..", append(os.Environ(), env...)
	var out, messages strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &messages
	err := cmd.Run()
	if err != nil {
		out.WriteString(messages.String())
	}
	return out.String(), err
}

// run is try for a line that must not fail.
func run(t *testing.T, line string, env ...string) string {
	t.Helper()
	out, err := try(t, line, env...)
	if err != nil {
		t.Fatalf("%s: %v\n%s", line, err, out)
	}
	return out
}

package main

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/nft/nfttest"
)

// secretFiles are keys of Secrets with their content.
func secretFiles(secret string) map[string]string {
	key := "-----BEGIN PRIVATE KEY-----\n" + secret + "\n-----END PRIVATE KEY-----\n"
	return map[string]string{
		"tls.key": key, "tls.crt": strings.ReplaceAll(key, "PRIVATE KEY", "CERTIFICATE"),
		"token": "eyJhbGciOi." + secret, "password": secret, "namespace": secret + "\n",
		"config":          "apiVersion: v1\nkind: Config\nusers:\n- name: admin\n  user: {token: " + secret + "}\n",
		"config.json":     `{"auths": {"registry.example": {"auth": "` + secret + `"}}}`,
		"credentials.yml": "password: " + secret + "\n", "id.yaml": secret, "key.yaml": key, "broken.json": `{"token": "` +
			secret,
	}
}

func TestSecretVolumeInPlaceOfTheConfigIsNotPrinted(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	const secret = "hunter2hunter2"
	all := secretFiles(secret)
	for name, files := range map[string][]string{
		"all": slices.Sorted(maps.Keys(all)), "of an account": {"namespace", "token"}, "a kubeconfig": {"config"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.check(os.MkdirAll(filepath.Join(n.path, "..1"), 0o755))
			n.check(os.Symlink("..1", filepath.Join(n.path, "..data")))
			for _, f := range files {
				n.check(os.WriteFile(filepath.Join(n.path, "..1", f), []byte(all[f]), 0o600))
				n.check(os.Symlink("..data/"+f, filepath.Join(n.path, f)))
			}
			socket := n.socket
			d := n.start("--v=4", "--http-address", httpAddress, "--probe-socket", socket)
			d.began(wants(t, ""))
			printed := map[string]string{}
			for _, path := range []string{"/readyz", "/metrics"} {
				_, printed[path] = n.get(path)
			}
			paths := []string{n.path}
			for _, f := range files {
				paths = append(paths, filepath.Join(n.path, f))
			}
			for _, command := range []string{"check", "check -o json", "status", "explain 10.1.2.3", "diff", "render"} {
				for _, path := range paths {
					if path != n.path && command != "check" {
						continue // all commands parse a file in the same way
					}
					r := n.run(append(strings.Fields(command), "--config", path)...)
					printed[command+" "+path] = r.stdout + r.stderr
				}
			}
			ready := n.run("ready", "--probe-socket", socket)
			printed["ready"] = ready.stdout + ready.stderr
			d.stop()
			printed["the log"] = d.Text()
			for what, text := range printed {
				if text == "" || strings.Contains(text, secret) {
					t.Errorf("%s: %s", what, text)
				}
			}
		})
	}
}

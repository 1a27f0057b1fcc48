package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/google/go-cmp/cmp"
	sigsyaml "sigs.k8s.io/yaml"
)

// olderConfig is what the agents of the iptables generation unmarshal into.
type olderConfig struct {
	NonMasqueradeCIDRs []string      `json:"nonMasqueradeCIDRs"`
	CIDRLimit          int           `json:"cidrLimit"`
	MasqLinkLocal      bool          `json:"masqLinkLocal"`
	MasqLinkLocalIPv6  bool          `json:"masqLinkLocalIPv6"`
	ResyncInterval     olderDuration `json:"resyncInterval"`
}

// olderDuration unmarshals as metav1.Duration of k8s.io/apimachinery does.
type olderDuration time.Duration

func (d *olderDuration) UnmarshalJSON(b []byte) error {
	var s string
	if err := json.Unmarshal(b, &s); err != nil {
		return err
	}
	p, err := time.ParseDuration(s)
	*d = olderDuration(p)
	return err
}

// readAsOlderAgent reads a file as kubernetes-sigs/ip-masq-agent v2.12 does
// with IPv6 on: YAML to JSON, unless it looks like JSON, then encoding/json,
// then its own validation. It returns the meaning in one line.
func readAsOlderAgent(data []byte) (string, error) {
	if !bytes.HasPrefix(bytes.TrimLeftFunc(data, unicode.IsSpace), []byte("{")) {
		var err error
		if data, err = sigsyaml.YAMLToJSON(data); err != nil {
			return "", err
		}
	}
	c := olderConfig{
		NonMasqueradeCIDRs: strings.Fields(rfc1918),
		CIDRLimit:          1 << 30, // theirs is 64
		ResyncInterval:     olderDuration(time.Minute),
	}
	if err := json.Unmarshal(data, &c); err != nil {
		return "", err
	}
	if len(c.NonMasqueradeCIDRs) > c.CIDRLimit {
		return "", errors.New("too many CIDRs")
	}
	for i, s := range c.NonMasqueradeCIDRs {
		ip, network, err := net.ParseCIDR(s)
		if err != nil {
			return "", err
		}
		if !ip.Equal(network.IP) {
			return "", errors.New("not aligned")
		}
		c.NonMasqueradeCIDRs[i] = network.String()
	}
	return fmt.Sprint(c.NonMasqueradeCIDRs, c.MasqLinkLocal, c.MasqLinkLocalIPv6, time.Duration(c.ResyncInterval)), nil
}

// refusals are the errors that the older agents do not have, each documented.
var refusals = regexp.MustCompile(`(?m)` + strings.Join([]string{
	`a second document`,
	`for the second time`,
	`did you mean`,
	`IPv4-mapped`,
	`want more than zero`,
	`larger than 4 MiB`,
	`more than \d+ %TAG`,
	`the aliases expand`,
	`linkLocal is the inverse`,
	`(linkLocal|enableIPv6) is `,
	`an empty entry`, // null leaves the default of the same index standing there, by accident
}, "|"))

// newerLists are the keys of lists that the older agents ignore.
var newerLists = regexp.MustCompile(`(?i)forceMasqueradeCIDRs|masqueradeSrcCIDRs`)

// agreeWithOlderAgent holds Parse against an older agent: what that accepts is
// accepted with the same meaning, or refused for a documented reason.
func agreeWithOlderAgent(t *testing.T, data []byte) {
	t.Helper()
	want, err := readAsOlderAgent(data)
	if err != nil {
		return
	}
	c, warnings, err := Parse(Defaults{EnableIPv6: true}, Source{Name: "f", Data: data})
	if err != nil {
		if !refusals.MatchString(err.Error()) && !newerLists.Match(data) && !behindTheDocument(data, err, want) {
			t.Errorf("an older agent accepts this as %s\n%q\ngot %v", want, data, err)
		}
		return
	}
	if strings.Contains(warningLines(warnings), keyLinkLocal+" is deprecated") {
		return // they ignore it
	}
	got := fmt.Sprint(strings.Fields(prefixes(c.NonMasqueradeCIDRs)), c.MasqLinkLocal, c.MasqLinkLocalIPv6, c.ResyncInterval)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%q (-older agent +got):\n%s", data, diff)
	}
}

// behindTheDocument reports whether a syntax error stands in text that yaml.v2
// does not read: the file means the same without it.
func behindTheDocument(data []byte, err error, want string) bool {
	problems, _ := err.(Problems)
	if !strings.HasPrefix(problems[0].Msg, "syntax: ") {
		return false
	}
	before := newText(Source{Data: data}).lines()[:problems[0].Pos.Line-1]
	got, err := readAsOlderAgent([]byte(strings.Join(before, "\n")))
	return err == nil && got == want
}

func TestFilesOfOlderAgentsKeepTheirMeaning(t *testing.T) {
	for _, dir := range []string{"good", "bad", "older"} {
		for _, name := range inputs(t, dir) {
			data, err := os.ReadFile(filepath.Join(corpus, dir, name))
			if err != nil {
				continue // a directory, which they do not read
			}
			t.Run(dir+"/"+name, func(t *testing.T) { agreeWithOlderAgent(t, data) })
		}
	}
}

// Every file of the corpus "older" is one that the older agents accept.
func TestTheCorpusOfOlderFilesIsAccepted(t *testing.T) {
	for _, name := range inputs(t, "older") {
		t.Run(name, func(t *testing.T) {
			data, err := os.ReadFile(filepath.Join(corpus, "older", name))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := readAsOlderAgent(data); err != nil {
				t.Errorf("the older agent: %v", err)
			}
			c, warnings, err := Parse(Defaults{EnableIPv6: true}, Source{Name: name, Data: data})
			if err != nil {
				t.Fatal(err)
			}
			golden(t, filepath.Join("older", stem(name)+".txt"), meaning(c, warnings))
		})
	}
}

func FuzzFilesOfOlderAgentsKeepTheirMeaning(f *testing.F) {
	seed(f)
	f.Fuzz(agreeWithOlderAgent)
}

package agent

import (
	"errors"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest/loop"
)

func rulesetOf(cidrs string) *nft.Ruleset {
	return nft.Build(config.Defaults{}, testSettings().NFT, loop.File(cidrs)...).Ruleset
}

func TestPolicyIsDecidedInThisOrder(t *testing.T) {
	left := &nft.Installed{Hash: "12345678"}
	bad := errors.New("bad")
	compiled := func(err error, cidr string) content {
		return content{files: loop.File(cidr), err: err, want: rulesetOf(cidr)}
	}
	lenient, other, good := compiled(bad, "10.2.0.0/16"), compiled(bad, "10.3.0.0/16"), compiled(nil, "10.4.0.0/16")
	rejected, defaults := content{err: bad}, content{want: rulesetOf("10.0.0.0/8"), missing: config.ErrMissing}
	of := func(from Source, c content) policy { return policy{source: from, want: c.want, content: c} }
	accepted := func(from Source, c content) policy {
		p := of(from, c)
		p.accepted = true
		return p
	}
	leniently, builtIn := of(FromLenient, lenient), of(FromDefaults, defaults)
	file, last, without := accepted(FromFile, good), accepted(FromPrevious, good), accepted(FromDefaults, defaults)
	kept, foreign := policy{source: FromPrevious, inherited: left}, policy{source: FromOlder}
	everything, older, empty := situation{left, true, defaults}, situation{nil, true, defaults},
		situation{nil, false, defaults}
	for _, tt := range []struct {
		name string
		now  policy
		c    content
		n    situation
		want policy
	}{
		{"what a previous run left comes first", policy{}, lenient, everything, kept},
		{"then what the older agents make of the file", policy{}, lenient, older, leniently},
		{"then the rules of an older agent", policy{}, rejected, older, foreign},
		{"then the defaults", policy{}, rejected, empty, builtIn},
		{"rules of a previous run stay as long as they are there", kept, lenient, everything, kept},
		{"once they are gone, it is decided again", kept, lenient, older, leniently},
		{"our own rules are not those of a previous run", leniently, other, everything, of(FromLenient, other)},
		{"the older agents keep what they have if they reject a file", leniently, rejected, older, leniently},
		{"a removed agent does not stay active with another file", foreign, rejected, empty, builtIn},
		{"the defaults stay next to an older agent that comes later", builtIn, rejected, older, builtIn},
		{"they give way to what the older agents make of a file", builtIn, lenient, empty, leniently},
		{"a good file always counts", foreign, good, everything, file},
		{"its absence too", file, defaults, empty, without},
		{"the last good config stays", file, lenient, everything, last},
		{"again and again", last, lenient, everything, last},
		{"so do the defaults of a missing file", without, lenient, everything, without},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := nextPolicy(tt.now, tt.c, tt.n)
			if got.source != tt.want.source || got.want != tt.want.want || got.content.want != tt.want.want ||
				got.accepted != tt.want.accepted || got.inherited != tt.want.inherited {
				t.Errorf("%+v, want %+v", got, tt.want)
			}
		})
	}
}

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"nft-masq-agent/nft/nfttest"
)

func TestLogHasTimeLevelAndMessage(t *testing.T) {
	var b bytes.Buffer
	log := newLogger(zapcore.AddSync(&b), optionsOf(t))
	log.Info("applied", zap.Duration("took", 1500*time.Microsecond), zap.Int("cidrs", 3))
	var line map[string]any
	nfttest.NoError(t, json.Unmarshal(b.Bytes(), &line))
	if at, err := time.Parse(time.RFC3339, line["time"].(string)); err != nil || time.Since(at).Abs() > time.Hour {
		t.Errorf("time %v: %v", line["time"], err)
	}
	delete(line, "time")
	want := map[string]any{"level": "info", "msg": "applied", "took": "1.5ms", "cidrs": 3.0}
	nfttest.Same(t, "(-want +got)", want, line)
}

func TestTextLog(t *testing.T) {
	var b bytes.Buffer
	log := newLogger(zapcore.AddSync(&b), optionsOf(t, "--log-format=text"))
	log.Error("config rejected; last good config (3f9a2c71) stays enforced", zap.Error(errors.New("config.yaml:4:5: bad")))
	_, line, _ := strings.Cut(b.String(), "Z  ")
	want := "ERROR  config rejected; last good config (3f9a2c71) stays enforced  {\"error\": \"config.yaml:4:5: bad\"}\n"
	nfttest.Same(t, "(-want +got)", want, line)
}

func TestDetailsAreLoggedFromLevel4On(t *testing.T) {
	for flags, want := range map[string]string{
		"": "", "--v=2": "", "--v=3": "", "--v=4": "detail", "--v=10": "detail",
		"--v=-1": "",
	} {
		var b bytes.Buffer
		newLogger(zapcore.AddSync(&b), optionsOf(t, strings.Fields(flags)...)).Debug("detail")
		if (b.Len() > 0) != (want != "") || !strings.Contains(b.String(), want) {
			t.Errorf("%q: logged %q", flags, b.String())
		}
	}
}

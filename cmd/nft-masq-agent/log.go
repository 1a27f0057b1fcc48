package main

import (
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
)

// debugVerbosity is the -v from which on details are logged. Clusters commonly
// run their agents with -v=2, which should be as quiet as 0.
const debugVerbosity = 4

// newLogger logs to w, which is stdout: log collectors treat everything on stderr
// as errors. Lines have time, level and message, but no caller or stack, and
// there is no sampling.
func newLogger(w zapcore.WriteSyncer, o cli.Options) *zap.Logger {
	encoding := zapcore.EncoderConfig{
		TimeKey:        "time",
		LevelKey:       "level",
		MessageKey:     "msg",
		EncodeTime:     encodeTime,
		EncodeLevel:    zapcore.LowercaseLevelEncoder,
		EncodeDuration: zapcore.StringDurationEncoder,
	}
	encoder := zapcore.NewJSONEncoder(encoding)
	if o.LogFormat == cli.LogText {
		encoding.EncodeLevel = zapcore.CapitalLevelEncoder
		encoding.ConsoleSeparator = "  "
		encoder = zapcore.NewConsoleEncoder(encoding)
	}
	level := zapcore.InfoLevel
	if o.Verbosity >= debugVerbosity {
		level = zapcore.DebugLevel
	}
	return zap.New(zapcore.NewCore(encoder, w, level))
}

// encodeTime writes RFC 3339 with milliseconds.
func encodeTime(t time.Time, e zapcore.PrimitiveArrayEncoder) {
	e.AppendString(t.UTC().Format("2006-01-02T15:04:05.000Z07:00"))
}

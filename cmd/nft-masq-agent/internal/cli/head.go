package cli

import (
	"fmt"

	"nft-masq-agent/config"
)

// A Head is the beginning of each answer, and all of it if the command failed.
type Head struct {
	// Version of this format. Within a version, properties are only added.
	Version int `json:"version"`
	// Command that answers.
	Command string `json:"command"`
	// Errors need action, and are the reason for exit code 1. The most serious one is first.
	Errors config.Problems `json:"errors"`
	// Warnings may need action.
	Warnings config.Problems `json:"warnings"`
	// Notes need no action.
	Notes config.Problems `json:"notes"`
}

// NewHead returns the beginning of a command's answer.
func NewHead(command string) Head {
	return Head{1, command, config.Problems{}, config.Problems{}, config.Problems{}}
}

// Begin returns the head, to complete it.
func (h *Head) Begin() *Head { return h }

// Take adds problems.
func (h *Head) Take(found config.Problems) {
	h.Errors = append(h.Errors, found.Faults()...)
	h.Warnings = append(h.Warnings, found.WithLevel(config.Warning)...)
	h.Notes = append(h.Notes, found.WithLevel(config.Note)...)
}

// Add adds a problem that is not about a place in a file.
func (h *Head) Add(level config.Level, id, format string, args ...any) {
	h.Take(config.Problems{Problem(level, id, format, args...)})
}

// Problem returns a problem that is not about a place in a file.
func Problem(level config.Level, id, format string, args ...any) config.Problem {
	return config.Problem{ID: id, Level: level, Msg: fmt.Sprintf(format, args...)}
}

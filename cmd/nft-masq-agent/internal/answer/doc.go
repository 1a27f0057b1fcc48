// Package answer creates the output of commands: check ([Check]), connections
// ([Connections]), diff ([Diff]), explain ([Explanation]), status ([Status]) and that of
// render for Windows ([WinBridge]). Text and JSON come from one value, which can be tested
// without a kernel. JSON begins with a [cli.Head]; manifests/schema describes it.
//
// It does not read or print: its input is the state that a command has read.
package answer

// Package answer creates the output of commands: check ([Check], [Meaning]), connections
// ([Connections]), diff ([Diff]), explain ([Explanation]), status ([Status]) and that of
// render for Windows ([WinBridge]). Text and JSON are made of one value, which can be tested
// without a kernel. JSON begins with a [Head]; manifests/schema describes it.
//
// Its input is what was read from the file and the kernel; it does not read or
// print.
package answer

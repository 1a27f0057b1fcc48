// Package answer creates the output of commands: check ([Check], [Meaning]),
// render ([Rendered], [WinBridge]), explain ([Explanation]) and status
// ([Status]), as text and as JSON, to which fields are only ever added. It exists
// so that both are made of one value, and can be tested without a kernel.
//
// Its input is what was read from the file and the kernel; it does not read or
// print.
package answer

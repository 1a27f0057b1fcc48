// Package answer makes what the commands answer: check ([Check], [Meaning]), render
// ([Rendered], [WinBridge]), explain ([Explanation]) and status ([Status]), each for
// people and, as JSON to which fields are only ever added, for programs. It exists so
// that both are made of one value, and can be tested without a kernel.
//
// It is given what was read of the file and of the kernel; it reads and prints
// nothing itself.
package answer

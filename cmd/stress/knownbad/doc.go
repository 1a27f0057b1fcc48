// Package knownbad contains update recipes for a table such as the agent's that
// lead to a wrong verdict for some packets: those of other programs, and obvious
// first attempts. They prove that a test detects wrong packets.
//
// Which of them are wrong depends on how the kernel looks up addresses in an
// interval set: see [Recipe.Shows].
package knownbad

// Package knownbad holds ways of updating a table such as the agent's that let
// packets see a wrong verdict, as other programs use them and as one would write
// them first. They show that a test sees wrong packets.
//
// Which of them are wrong depends on how the kernel looks addresses up in an
// interval set: see [Recipe.Shows].
package knownbad

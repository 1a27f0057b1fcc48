// Package cases provides policies for tests: the directories of testdata/cases,
// random configs, and a reference implementation of the policy in a few lines
// ([Specified]), with which the program is compared.
package cases

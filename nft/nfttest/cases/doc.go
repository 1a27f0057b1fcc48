// Package cases has what tests try policies with: the directories of
// testdata/cases, random configs, and in a few lines what a config means
// ([Specified]), against which the program is held.
package cases

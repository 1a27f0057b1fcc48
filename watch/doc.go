// Package watch follows the content of a path: a file, or a directory of files. It does
// not interpret the content; the caller reads it. It exists because a config can change
// in more ways than inotify reports for one path: links, mounts, parents.
//
// How it works: it checks the path once a second, and at each event of inotify. A check
// resolves the path and compares the state of the files (inode, size, times) with that at
// the last reading. The content is read only if that differs, or if inotify reported an
// event of these files. So inotify makes it fast, but nothing depends on it. It watches
// the directory of the path, the files' directories, and the path itself.
//
// Guarantees:
//
//   - The first content is delivered at once, or after at most half a second if the file
//     is being written at that moment.
//   - After that, each content is delivered that has settled and differs from the settled
//     one before. A slow receiver may miss intermediate states, but never the last one.
//   - An atomic swap is delivered at once: of the "..data" link of a Kubernetes volume, of
//     any other link on the way, or by a rename over the file.
//   - A file that was written in place is delivered after 50 ms in which all readings
//     agree. There is no upper bound: a program that writes different content
//     more often than that should rename instead. A swap ends the wait.
//   - Files that are gone or empty are a content after three seconds, because many programs
//     remove or truncate a file and then write it: until then nothing is delivered. A swap of
//     a link that leaves other files is delivered at once.
//   - Anything on the path may come and go: the file, its directory, any parent, any link,
//     a file system mounted over any of them or unmounted. What inotify does not report is
//     found within a second.
//   - After a check that took a processor time of c, the next one begins at least 200·c later,
//     so that they take at most 0.5 % of a processor, whatever other programs do. Five seconds
//     of such breaks are saved up, so that changes after a quiet time do not wait.
//
// The caller can ask for a reading at any time, for changes that leave no trace in the
// state of a file.
package watch

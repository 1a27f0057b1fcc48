// Package watch follows the content of a path: a file, or a directory of files.
// It does not interpret the content; the caller reads it. It exists because a config
// can change in more ways than inotify reports for one path: links, mounts, parents.
//
// Guarantees:
//
//   - The first content is delivered at once, or after at most half a second if
//     the file is being written at that moment.
//   - After that, every content is delivered that has settled and whose
//     fingerprint differs from the last one delivered. A slow receiver may miss
//     intermediate states, but never the last one.
//   - An atomic swap is delivered at once: of the "..data" link of a Kubernetes
//     volume, by a rename over the file, or of any link on the way.
//   - A file written in place is delivered after 50 ms without a write, if the
//     reads before and after agree. A file that vanished is treated the same,
//     because many programs remove a file and then write it again. There is no
//     upper bound: a program that writes more often than that should rename
//     instead. A swap ends the wait.
//   - A file system that does not respond delays neither the first content nor
//     the shutdown: the result of the caller's read is delivered. When the path
//     leads elsewhere, it is followed there, even if calls still hang.
//   - Anything on the path may come and go: the file, its directory, any parent,
//     any link in a chain of links, a file system mounted over any of them or
//     unmounted. If directories do not exist, the deepest one that exists is
//     watched until they do.
//
// How it works: there are inotify watches on exactly the directories through
// which the path is resolved, and only events for names on the path count, so
// that a busy directory such as /tmp on the way costs nothing. Watches belong to
// inodes and vanish with them, so every poll renews them. Inotify does not report
// mounts: for these the package polls /proc/self/mountinfo.
//
// Poll finds what inotify does not report, and the caller is expected to call it
// from time to time: files changed through another hard link, by mmap or on
// another machine, and all changes when inotify's limits are exhausted.
package watch

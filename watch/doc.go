// Package watch follows the content behind a path: a file, or a directory of
// files. It knows nothing of what the content means; the caller reads it.
//
// What it promises:
//
//   - The first content comes at once: after at most half a second where
//     somebody is writing the file at that moment.
//   - After that comes every content that has settled and whose fingerprint
//     differs from the one delivered last. A slow receiver misses what was in
//     between, never the last state.
//   - An atomic swap is delivered at once: the "..data" link of a Kubernetes
//     volume, a rename over the file, any link on the way.
//   - A file that is written in place is waited for until 50 ms have been quiet
//     and the reads before and after them agree. So is a file that vanished,
//     because many programs remove a file and then write it anew. There is no
//     upper bound: who writes more often than that should rename instead. A swap
//     ends the waiting.
//   - A file system that does not answer holds up neither the first content nor the
//     end: what the caller's read makes of it is delivered.
//   - The path may come and go: the file, its directory, any parent, any link of
//     a chain of links, a file system mounted over any of them or unmounted.
//     Directories that do not exist are waited for in the deepest one that does.
//
// How it does so: inotify watches on exactly the directories that the path's
// resolution passes, and of their events only those that carry a name which the
// resolution passes, so a busy directory such as /tmp on the way costs nothing.
// Watches sit on inodes and die with them, so at every look they are made anew.
// Inotify says nothing of mounts: for these the kernel's notice on
// /proc/self/mountinfo is used.
//
// What inotify does not tell, Look finds: the caller calls it now and then.
// That concerns files changed through another hard link, by mmap or on another
// machine, and everything where inotify's limits are exhausted.
package watch

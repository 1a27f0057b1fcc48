package options

import (
	"flag"
	"slices"
	"strconv"
)

// KlogFlags are the flags of klog and glog that have an effect.
type KlogFlags struct {
	Verbosity int
	logFile   string
}

// KlogNames lists the flags of k8s.io/klog/v2 2.140, and of github.com/golang/glog
// 1.2, which ip-masq-agent links. Those of klog 1 are among them.
func KlogNames() []string {
	return []string{
		"add_dir_header", "alsologtostderr", "alsologtostderrthreshold", "legacy_stderr_threshold_behavior",
		"log_backtrace_at", "log_dir", "log_file", "log_file_max_size", "log_link", "logbuflevel", "logtostderr",
		"one_output", "skip_headers", "skip_log_headers", "stderrthreshold", "v", "vmodule",
	}
}

// IsKlogFlag reports whether a flag is one of klog's or glog's.
func IsKlogFlag(name string) bool { return slices.Contains(KlogNames(), name) }

// addKlogFlags declares the flags of klog and glog, so that command lines for
// them are accepted. All except -v are ignored: the log goes to stdout.
func addKlogFlags(fs *flag.FlagSet) *KlogFlags {
	k := &KlogFlags{}
	const nothing = "accepted, does nothing"
	for _, name := range KlogNames() {
		switch name {
		case "v":
			AddFlag(fs, &k.Verbosity, name, "0", "log `LEVEL`: from 4 on, details too", strconv.Atoi)
		case "log_file":
			fs.StringVar(&k.logFile, name, "", nothing)
		case "alsologtostderrthreshold", "log_backtrace_at", "log_dir", "log_file_max_size", "log_link", "logbuflevel", "stderrthreshold", "vmodule":
			fs.String(name, "", nothing)
		default:
			fs.Bool(name, name == "logtostderr" || name == "legacy_stderr_threshold_behavior", nothing)
		}
	}
	return k
}

// IgnoredFile returns the path of --log_file if users might expect the log there,
// otherwise "".
func (k KlogFlags) IgnoredFile() string {
	if slices.Contains([]string{"/dev/stdout", "/dev/stderr", "/dev/null"}, k.logFile) {
		return ""
	}
	return k.logFile
}

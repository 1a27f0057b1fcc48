package cli

import (
	"flag"
	"strconv"
)

// IsKlogFlag reports whether a flag is one of klog's or glog's.
func IsKlogFlag(name string) bool {
	fs := flag.NewFlagSet("", flag.ContinueOnError)
	new(Options).addKlogFlags(fs)
	return fs.Lookup(name) != nil
}

// addKlogFlags declares the flags of k8s.io/klog/v2 2.140, and of
// github.com/golang/glog 1.2, which ip-masq-agent links, so that command lines for
// them are accepted. Those of klog 1 are among them. All except -v are ignored:
// the log goes to stdout.
func (o *Options) addKlogFlags(fs *flag.FlagSet) {
	const nothing = "accepted, does nothing"
	AddFlag(fs, &o.Verbosity, "v", "0", "log `LEVEL`: from 4 on, details too", strconv.Atoi)
	for _, name := range []string{
		"alsologtostderrthreshold", "log_backtrace_at", "log_dir", "log_file", "log_file_max_size", "log_link", "logbuflevel",
		"stderrthreshold", "vmodule",
	} {
		fs.String(name, "", nothing)
	}
	for _, name := range []string{"add_dir_header", "alsologtostderr", "one_output", "skip_headers", "skip_log_headers"} {
		fs.Bool(name, false, nothing)
	}
	for _, name := range []string{"legacy_stderr_threshold_behavior", "logtostderr"} {
		fs.Bool(name, true, nothing)
	}
}

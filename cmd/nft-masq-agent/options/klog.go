package options

import (
	"errors"
	"flag"
	"slices"
	"strconv"
	"strings"
)

// KlogFlags are what the flags of klog say that means something here.
type KlogFlags struct {
	Verbosity int
	logFile   string
}

// KlogNames lists the flags of k8s.io/klog/v2 2.140.
func KlogNames() []string {
	return []string{
		"add_dir_header", "alsologtostderr", "alsologtostderrthreshold", "legacy_stderr_threshold_behavior",
		"log_backtrace_at", "log_dir", "log_file", "log_file_max_size", "logtostderr", "one_output",
		"skip_headers", "skip_log_headers", "stderrthreshold", "v", "vmodule",
	}
}

// IsKlogFlag says whether a flag is one of klog's.
func IsKlogFlag(name string) bool { return slices.Contains(KlogNames(), name) }

// addKlogFlags declares klog's flags with klog's types and defaults, so that a
// command line that klog takes is taken. All but -v do nothing: the log goes to
// stdout.
func addKlogFlags(fs *flag.FlagSet) *KlogFlags {
	k := &KlogFlags{}
	const nothing = "accepted, does nothing"
	for _, name := range KlogNames() {
		switch name {
		case "v":
			AddFlag(fs, &k.Verbosity, name, "0", "log `LEVEL`: from 4 on, details too", parseVerbosity)
		case "log_file":
			fs.StringVar(&k.logFile, name, "", nothing)
		case "log_dir":
			fs.String(name, "", nothing)
		case "log_file_max_size":
			fs.Uint64(name, 1800, nothing)
		case "stderrthreshold", "alsologtostderrthreshold":
			AddFlag(fs, new(string), name, "", nothing, parseSeverity)
		case "vmodule":
			AddFlag(fs, new(string), name, "", nothing, parseVModule)
		case "log_backtrace_at":
			AddFlag(fs, new(string), name, "", nothing, parseTrace)
		default:
			fs.Bool(name, name == "logtostderr" || name == "legacy_stderr_threshold_behavior", nothing)
		}
	}
	return k
}

// IgnoredFile gives the path of --log_file where somebody might wait for the
// log to appear there, else "".
func (k KlogFlags) IgnoredFile() string {
	if slices.Contains([]string{"/dev/stdout", "/dev/stderr", "/dev/null"}, k.logFile) {
		return ""
	}
	return k.logFile
}

func parseVerbosity(s string) (int, error) {
	n, err := strconv.ParseInt(s, 10, 32)
	if err != nil {
		return 0, errors.New("is not a whole number")
	}
	return int(n), nil
}

func parseSeverity(s string) (string, error) {
	if _, err := strconv.ParseInt(s, 10, 32); err == nil || s == "" {
		return s, nil
	}
	if slices.Contains([]string{"INFO", "WARNING", "ERROR", "FATAL"}, strings.ToUpper(s)) {
		return s, nil
	}
	return "", errors.New("is neither INFO, WARNING, ERROR or FATAL nor a number")
}

func parseVModule(s string) (string, error) {
	for _, part := range strings.Split(s, ",") {
		pattern, level, _ := strings.Cut(part, "=")
		if n, err := strconv.ParseInt(level, 10, 32); part != "" && (err != nil || n < 0 || pattern == "") {
			return "", errors.New("is no list of PATTERN=LEVEL")
		}
	}
	return s, nil
}

func parseTrace(s string) (string, error) {
	file, line, _ := strings.Cut(s, ":")
	if n, err := strconv.Atoi(line); s != "" && (err != nil || n <= 0 || !strings.Contains(file, ".")) {
		return "", errors.New("is no FILE:LINE")
	}
	return s, nil
}

package gvisor

import (
	"encoding/json"
	"io"
	"math"
	"os"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/runsc/cli"
	"gvisor.dev/gvisor/runsc/cmd"
	"gvisor.dev/gvisor/runsc/cmd/sentry/sentrycmd"
	"gvisor.dev/gvisor/runsc/cmd/util"
	"gvisor.dev/gvisor/runsc/version"
)

var _ = version.Version() // links the version that runsc prints

// ReExecuted says whether this process is one that gVisor started by
// re-executing the binary: the application kernel, the file server or the
// unmounter. Main must be called then, before anything else.
func ReExecuted(args []string) bool {
	return strings.HasPrefix(args[0], "runsc-") || (len(args) > 1 && args[1] == "umount")
}

// Main runs a re-executed process. It does not return.
func Main() {
	closeLeaked(os.Args)
	os.Args = withLimits(os.Args)
	cli.Run(nil, map[util.SubCommand]string{
		new(sentrycmd.Boot):   "",
		new(cmd.Gofer):        "",
		new(sentrycmd.Umount): "",
	}, nil)
	os.Exit(128)
}

// CLI runs the bare runsc with args, for comparison and debugging. It does
// not return.
func CLI(args []string) {
	os.Args = append([]string{"runsc"}, args...)
	commands := map[util.SubCommand]string{}
	for _, c := range []util.SubCommand{
		new(cmd.Checkpoint), new(cmd.Create), new(cmd.Debug), new(cmd.Delete), new(cmd.Do), new(cmd.Events), new(cmd.Exec),
		new(cmd.Kill), new(cmd.List), new(cmd.PS), new(cmd.Pause), new(cmd.Restore), new(cmd.Resume), new(cmd.Run),
		new(cmd.Spec), new(cmd.Start), new(cmd.State), new(cmd.Wait), new(sentrycmd.Boot), new(cmd.Gofer), new(sentrycmd.Umount),
	} {
		commands[c] = ""
	}
	cli.Run(nil, commands, nil)
	os.Exit(128)
}

// closeLeaked closes what this process inherited unasked. runsc opens some
// descriptors, control sockets among them, without close-on-exec; it was made
// for a process that starts one sandbox, and a server that starts many would
// leak one's into another's. What was given on purpose is named in the
// arguments and numbered without gaps; the rest that an exec let through lacks
// close-on-exec, which all that the Go runtime opened itself has.
func closeLeaked(args []string) {
	last := 2
	for _, a := range args {
		name, value, ok := strings.Cut(a, "=")
		if !ok || !(strings.HasSuffix(name, "-fd") || strings.HasSuffix(name, "-fds")) {
			continue
		}
		for _, v := range strings.Split(value, ",") {
			host, _, _ := strings.Cut(v, ":") // --pass-fd=HOST:GUEST
			if fd, err := strconv.Atoi(host); err == nil {
				last = max(last, fd)
			}
		}
	}
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return // without /proc gVisor itself does not start
	}
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil || fd <= last {
			continue
		}
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
			unix.Close(fd)
		}
	}
}

// withLimits makes the application kernel show the sandbox's own memory and
// processors. runsc derives both from the cgroup that it creates and joins;
// joining moves the whole calling process on cgroup v1, which a server of
// many sandboxes must not do, so the driver places processes itself and the
// values come from the spec, here, in the process that boots.
func withLimits(args []string) []string {
	fd := -1
	for _, a := range args {
		if v, ok := strings.CutPrefix(a, "--spec-fd="); ok {
			fd, _ = strconv.Atoi(v)
		}
	}
	if fd < 0 || len(args) == 0 || args[0] != "runsc-sandbox" {
		return args
	}
	var spec specs.Spec
	if json.NewDecoder(io.NewSectionReader(preader(fd), 0, 1<<20)).Decode(&spec) != nil || spec.Linux == nil || spec.Linux.Resources == nil {
		return args
	}
	res := spec.Linux.Resources
	out := make([]string, 0, len(args)+2)
	for i := 0; i < len(args); i++ {
		if args[i] == "--total-memory" && i+1 < len(args) && res.Memory != nil && res.Memory.Limit != nil {
			out = append(out, "--total-memory", strconv.FormatInt(*res.Memory.Limit, 10))
			i++
			continue
		}
		if args[i] == "boot" && res.CPU != nil && res.CPU.Quota != nil && res.CPU.Period != nil {
			cpus := int(math.Ceil(float64(*res.CPU.Quota) / float64(*res.CPU.Period)))
			out = append(out, "boot", "--cpu-num="+strconv.Itoa(max(1, cpus)))
			continue
		}
		out = append(out, args[i])
	}
	return out
}

// preader reads a descriptor by offset and leaves its position alone.
type preader int

func (p preader) ReadAt(b []byte, off int64) (int, error) {
	n, err := unix.Pread(int(p), b, off)
	if err == nil && n < len(b) {
		err = io.EOF
	}
	return max(n, 0), err
}

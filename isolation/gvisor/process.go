package gvisor

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// statFields returns the fields of /proc/pid/stat from the third on; the
// second, the name, may contain anything.
func statFields(pid int) []string {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil
	}
	s := string(data)
	return strings.Fields(s[strings.LastIndexByte(s, ')')+1:])
}

// startTime identifies a process together with its pid, which may be used
// again. It is 0 if the process does not run or is a zombie.
func startTime(pid int) uint64 {
	f := statFields(pid)
	if len(f) < 20 || f[0] == "Z" || f[0] == "X" {
		return 0
	}
	t, _ := strconv.ParseUint(f[19], 10, 64)
	return t
}

const ticksPerSecond = 100 // USER_HZ, the same on every Linux that Go runs on

func processSeconds(pid int) float64 {
	f := statFields(pid)
	if len(f) < 13 {
		return 0
	}
	user, _ := strconv.ParseInt(f[11], 10, 64)
	system, _ := strconv.ParseInt(f[12], 10, 64)
	return float64(user+system) / ticksPerSecond
}

// descendants returns pid and everything it started.
func descendants(pid int) []int {
	all := []int{pid}
	for i := 0; i < len(all); i++ {
		tasks, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", all[i]))
		for _, t := range tasks {
			data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", all[i], t.Name()))
			for _, f := range strings.Fields(string(data)) {
				if child, err := strconv.Atoi(f); err == nil {
					all = append(all, child)
				}
			}
		}
	}
	return all
}

// processExit waits for the end of a process that may or may not be our
// child, and reaps it if it is.
type processExit struct {
	pid  int
	file *os.File
}

func watchProcess(pid int) (*processExit, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watch process %d: %w", pid, err)
	}
	return &processExit{pid: pid, file: os.NewFile(uintptr(fd), "pidfd")}, nil
}

// wait returns when the process has ended; how it ended is known only for a child.
func (p *processExit) wait() (status unix.WaitStatus, known bool) {
	defer p.file.Close()
	raw, err := p.file.SyscallConn()
	if err == nil {
		raw.Read(func(fd uintptr) bool {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
			return n > 0 || (err != nil && err != unix.EINTR)
		})
	}
	for {
		pid, err := unix.Wait4(p.pid, &status, 0, nil)
		if err == unix.EINTR {
			continue
		}
		return status, err == nil && pid == p.pid
	}
}

// kill ends the process; of one that has ended already it is a no-op.
func (p *processExit) kill() {
	if raw, err := p.file.SyscallConn(); err == nil {
		raw.Control(func(fd uintptr) { unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0) })
	}
}

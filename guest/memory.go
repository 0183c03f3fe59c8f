package guest

import (
	"bytes"
	"slices"
	"strconv"
	"strings"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/channel"
	"golang.org/x/sys/unix"
)

// The memory watch keeps the soft limit of all user processes together: what
// is over it costs the largest process its life, and the sandbox lives on.
// What counts is AnonPages of /proc/meminfo, in gVisor the anonymous memory
// and tmpfs of the whole sandbox, each page once; the page cache of the disk
// overlay, which the host can reclaim, is not in it. The guest's own share is
// taken off. The sum of the processes' RSS would count shared pages often.

const (
	// allocRate is how fast memory is assumed to be allocated, bytes/s. The
	// watch sleeps no longer than the limit can be reached at that rate.
	allocRate = 2 << 30
	watchMin  = 10 * time.Millisecond
	watchMax  = 200 * time.Millisecond
	// watchFirst is when the first look at a program comes at the latest, as
	// what was used before it may be more than at the look before. Most
	// programs have ended by then, and cost no look.
	watchFirst = 50 * time.Millisecond
	// settle is how long a killed process's memory may take to be free
	// before the next process is held to account for it.
	settle = 500 * time.Millisecond
	page   = 4096
)

func (g *guest) watchMemory(stop <-chan struct{}) {
	var limit, used int64 // when last looked at
	first := true
	for {
		pause := min(max(time.Duration(float64(limit-used)/allocRate*float64(time.Second)), watchMin), watchMax)
		if first {
			pause = min(pause, watchFirst)
		}
		select {
		case <-time.After(pause):
		case <-stop:
			return
		}
		g.mu.Lock()
		limit = g.hello.MemoryBytes
		own := g.ownPIDs()
		running := len(g.execs) > 0
		g.mu.Unlock()
		pids, _ := g.pids()
		if first = limit == 0 || !running && len(pids) < len(own); first {
			select {
			case <-g.wake:
			case <-stop:
				return
			}
			continue
		}
		if used, _ = anonymous(); used > limit {
			used -= resident(own)
		}
		if used > limit {
			g.relieve(used, limit, own)
		}
	}
}

// ownPIDs are those of the guest itself; called with mu held.
func (g *guest) ownPIDs() []int {
	own := []int{g.self}
	for _, h := range g.helpers {
		if !h.reaped {
			own = append(own, h.pid)
		}
	}
	return own
}

// anonymous returns the memory in use that cannot be reclaimed, and the total.
func anonymous() (used, total int64) {
	var buf [2048]byte
	b, _ := readSmall("/proc/meminfo", buf[:])
	return meminfo(b, "AnonPages:") + onLinux(b), meminfo(b, "MemTotal:")
}

// onLinux is the tmpfs memory where AnonPages does not hold it: gVisor adds
// it and says so by having no Inactive(anon).
func onLinux(b []byte) int64 {
	if meminfo(b, "Active(anon):") == meminfo(b, "AnonPages:") {
		return 0
	}
	return meminfo(b, "Shmem:")
}

func meminfo(b []byte, name string) int64 {
	_, rest, ok := bytes.Cut(b, []byte(name))
	if !ok {
		return 0
	}
	line, _, _ := strings.Cut(string(rest), "\n")
	kb, _ := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(line, "kB")), 10, 64)
	return kb << 10
}

// resident sums the resident memory of processes.
func resident(pids []int) int64 {
	var sum int64
	for _, pid := range pids {
		sum += rss(pid)
	}
	return sum
}

func rss(pid int) int64 {
	var buf [256]byte
	b, _ := readSmall("/proc/"+strconv.Itoa(pid)+"/statm", buf[:])
	f := strings.Fields(string(b))
	if len(f) < 2 {
		return 0
	}
	n, _ := strconv.ParseInt(f[1], 10, 64)
	return n * page
}

// relieve kills the largest processes, as many as hold what is over the limit.
func (g *guest) relieve(used, limit int64, own []int) {
	type victim struct {
		pid int
		rss int64
	}
	var victims []victim
	pids, _ := g.pids() // what cannot be seen is left to the wall
	for _, pid := range pids {
		if !slices.Contains(own, pid) {
			victims = append(victims, victim{pid, rss(pid)})
		}
	}
	slices.SortFunc(victims, func(a, b victim) int { return int((b.rss - a.rss) / page) })
	var killed []int
	for over := used - limit; over > 0 && len(victims) > 0 && victims[0].rss > 0; victims = victims[1:] {
		v := victims[0]
		// It stops first: a dead process has no owner any more.
		g.send(v.pid, unix.SIGSTOP)
		g.blame(v.pid)
		g.send(v.pid, unix.SIGKILL)
		killed = append(killed, v.pid)
		over -= v.rss
	}
	if len(killed) == 0 {
		return // it is in tmpfs, or the process has just ended
	}
	for began := time.Now(); time.Since(began) < settle; {
		time.Sleep(watchMin / 2)
		now, _ := anonymous()
		if now <= limit || now > used+(64<<20) { // freed, or someone else goes on
			return
		}
	}
}

// blame marks the exec that a process belongs to.
func (g *guest) blame(pid int) {
	all, _ := g.look()
	for _, p := range all {
		if p.pid == pid && p.exec != nil {
			g.mu.Lock()
			p.exec.oom = true
			g.mu.Unlock()
		}
	}
}

func (g *guest) usage(channel.Empty) (channel.Usage, error) {
	g.mu.Lock()
	limit := g.hello.MemoryBytes
	own := g.ownPIDs()
	g.mu.Unlock()
	used, total := anonymous()
	pids, err := g.pids()
	if err != nil {
		return channel.Usage{}, airlock.Errorf(airlock.Unavailable, "the processes cannot be seen").Because(err)
	}
	if limit > 0 {
		total = limit
	}
	u := channel.Usage{
		MemoryUsed: max(0, used-resident(own)), MemoryTotal: total,
		Processes: max(0, len(pids)-(len(own)-1)),
	}
	var fs unix.Statfs_t
	if err := unix.Statfs("/", &fs); err == nil {
		u.DiskTotal = int64(fs.Blocks) * fs.Bsize
		u.DiskUsed = int64(fs.Blocks-fs.Bfree) * fs.Bsize
	}
	return u, nil
}

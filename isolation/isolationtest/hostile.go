package isolationtest

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/channel"
	"airlock.dev/airlock/isolation"
)

// Host is what the test planted on this machine for hostile code to find.
type Host struct {
	Canary     string   // text that is in every planted file
	Files      []string // planted files that nobody inside may read
	Written    string   // a path under /usr that does not exist on the host
	Exists     func(path string) bool
	TCP        string // host:port of a listener on the host's loopback
	Abstract   string // name of an abstract unix socket on the host
	SocketFile string // path of a unix socket on the host, below /usr
}

// probe is a program that is run inside; want is matched with all of stdout.
type probe struct {
	name string
	user string // "" is user
	sh   string // a shell script, or
	py   string // a Python program
	want string // regular expression for the whole output, trimmed
	code int
}

func run(t *testing.T, b *box, p probe) result {
	t.Helper()
	req := channel.StartRequest{Cmd: "/bin/bash", Args: []string{"-c", p.sh}, User: p.user}
	if p.py != "" {
		req = channel.StartRequest{Cmd: "/usr/bin/python3", Args: []string{"-c", p.py}, User: p.user}
	}
	return exec(t, b.mux, req)
}

func (p probe) check(t *testing.T, b *box) {
	t.Helper()
	r := run(t, b, p)
	if !regexp.MustCompile(`(?s)^(?:`+p.want+`)$`).MatchString(strings.TrimSpace(r.out)) || r.end.ExitCode != p.code || r.end.Outcome != airlock.Exited {
		t.Errorf("got %q, stderr %.2000q, end %+v; want output %q and code %d", r.out, r.err, r.end, p.want, p.code)
	}
}

// alive fails the test unless the next command works.
func alive(t *testing.T, b *box) {
	t.Helper()
	if r := exec(t, b.mux, channel.StartRequest{Cmd: "/bin/echo", Args: []string{"alive"}}); r.out != "alive\n" {
		t.Errorf("the next command: %+v", r)
	}
}

func inside(t *testing.T, h Harness) {
	b := h.create(t, nil, nil)
	for _, p := range []probe{
		{name: "it is user with a home", sh: `id -u; id -un; pwd; echo $HOME; touch ~/x && echo ok`, want: "1000\nuser\n/home/user\n/home/user\nok"},
		{name: "root is root inside", user: "root", sh: `id -u; echo $HOME`, want: "0\n/root"},
		{name: "sudo needs no password", sh: `sudo id -u; sudo -u user id -un; sudo sh -c 'echo $SUDO_USER'`, want: "0\nuser\nuser"},
		{name: "sudo keeps exit codes", sh: `sudo sh -c 'exit 9'`, code: 9},
		{name: "the locale is UTF-8", py: `import sys,locale; print(sys.stdout.encoding, locale.getpreferredencoding())`, want: "utf-8 (UTF-8|utf-8)"},
		{name: "python and python3 are there", sh: `python -c 'print(6*7)'; python3 -c 'print(6*7)'`, want: "42\n42"},
		{name: "tmp and shm can be written", sh: `for d in /tmp /var/tmp /dev/shm; do echo x > $d/t && stat -c %a $d; done`, want: "1777\n1777\n1777"},
		{name: "null, zero and random are there", sh: `head -c4 /dev/zero | wc -c; head -c4 /dev/urandom | wc -c; echo x >/dev/null && echo ok`, want: "4\n4\nok"},
		{name: "exit codes", sh: `exit 42`, code: 42},
		{name: "bytes are bytes", py: `import sys; sys.stdout.buffer.write(bytes(range(1,33))+b"\xff\xfe"); sys.stdout.flush(); print(len(sys.argv))`, want: `.*\x{FFFD}.*1|.*`},
		{name: "the host name is the sandbox's", sh: `hostname 2>/dev/null || cat /proc/sys/kernel/hostname`, want: "sandbox"},
		{name: "it sees its own processes only", sh: `ls /proc | grep -c '^[0-9]'`, want: `[1-9]`},
		{name: "the kernel is gVisor's", user: "root", sh: `dmesg | grep -c gVisor`, want: `[1-9]`},
		{name: "orphans are reaped", sh: `for i in $(seq 50); do (sleep 0.01 &) ; done; sleep 0.6; ps ax -o stat= | grep -c '^Z'`, want: "0", code: 1},
		{name: "stdin is empty unless asked for", sh: `cat; echo end`, want: "end"},
		{name: "the memory it is told is its own", sh: `awk '/MemTotal/{print ($2 < 600000) ? "own" : $2}' /proc/meminfo`, want: "own"},
		{name: "a Python program with threads and subprocesses", py: `
import subprocess, threading
out = []
ts = [threading.Thread(target=lambda i=i: out.append(subprocess.check_output(["echo", str(i)]))) for i in range(8)]
[t.start() for t in ts]; [t.join() for t in ts]
print(sorted(int(o) for o in out))`, want: regexp.QuoteMeta("[0, 1, 2, 3, 4, 5, 6, 7]")},
		{name: "files keep extended attributes", user: "root", py: `
import os
for f in ("/home/user/attr", "/tmp/attr", "/dev/shm/attr", "/usr/bin/env"):
    open(f, "ab").close()
    os.setxattr(f, "user.e2b.k", b"v")
    os.rename(f, f + "2")
    os.rename(f + "2", f)
    print(os.getxattr(f, "user.e2b.k") == b"v", end=" ")`, want: "True True True True"},
		{name: "sqlite, ssl and json load", py: `import sqlite3, ssl, json, hashlib; print(sqlite3.connect(":memory:").execute("select 1").fetchone()[0])`, want: "1"},
	} {
		t.Run(p.name, func(t *testing.T) { p.check(t, b) })
	}
	watching(t, b)
	t.Run("stdin is passed and half-closed", func(t *testing.T) {
		r, err := tryExec(t.Context(), b.mux, channel.StartRequest{Cmd: "/usr/bin/wc", Args: []string{"-c"}, Stdin: true}, strings.Repeat("x", 300_000))
		if err != nil || strings.TrimSpace(r.out) != "300000" {
			t.Errorf("got %+v, %v", r, err)
		}
	})
	t.Run("a signal reaches the whole tree", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		s, err := b.mux.Open(ctx, channel.MethodStart, channel.StartRequest{Cmd: "/bin/bash", Args: []string{"-c", `(setsid sh -c 'sleep 777 & wait' &) ; setsid sleep 778 & sleep 779`}})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		_, _, err = s.Recv(ctx) // started
		if err != nil {
			t.Fatal(err)
		}
		waitFor(t, b, `pgrep -c -x sleep`, "3")
		list, err := channel.CallAll[channel.ProcessInfo](ctx, b.mux, channel.MethodProcesses, channel.Empty{}, 100)
		if err != nil || len(list) != 1 {
			t.Fatalf("processes: %+v, %v", list, err)
		}
		if _, err := channel.Call[channel.Empty](ctx, b.mux, channel.MethodSignal, channel.SignalRequest{ProcessRef: channel.ProcessRef{PID: list[0].PID}, Signal: 9}); err != nil {
			t.Fatal(err)
		}
		waitFor(t, b, `pgrep -c -x sleep`, "0")
	})
	t.Run("processes go on over a new session", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		s, err := b.mux.Open(ctx, channel.MethodStart, channel.StartRequest{Cmd: "/bin/sleep", Args: []string{"555"}, Tag: "long"})
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := s.Recv(ctx); err != nil {
			t.Fatal(err)
		}
		b.mux = greet(t, b.Sandbox, b.spec, nil)
		list, err := channel.CallAll[channel.ProcessInfo](ctx, b.mux, channel.MethodProcesses, channel.Empty{}, 100)
		if err != nil || len(list) != 1 || list[0].Tag != "long" || list[0].Cmd != "/bin/sleep" {
			t.Errorf("processes: %+v, %v", list, err)
		}
		if _, err := channel.Call[channel.Empty](ctx, b.mux, channel.MethodSignal, channel.SignalRequest{ProcessRef: channel.ProcessRef{Tag: "long"}, Signal: 9}); err != nil {
			t.Error(err)
		}
	})
}

func waitFor(t *testing.T, b *box, sh, want string) {
	t.Helper()
	re := regexp.MustCompile(`^(?:` + want + `)$`)
	var last string
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		last = strings.TrimSpace(run(t, b, probe{sh: sh}).out)
		if re.MatchString(last) {
			return
		}
	}
	t.Errorf("%s: %q, want %s", sh, last, want)
}

const memoryBomb = `
all = []
while True:
    all.append(bytearray(b"x" * (8 << 20)))`

// slowMemoryBomb leaves the memory watch time on a machine that is busy with
// other tests: it looks only when it is given the processor.
const slowMemoryBomb = `
import time
all = []
while True:
    all.append(bytearray(b"x" * (8 << 20)))
    time.sleep(0.01)`

func limits(t *testing.T, h Harness) {
	t.Run("memory: the largest process is ended and the sandbox lives", func(t *testing.T) {
		b := h.create(t, nil, nil)
		for range 2 {
			if r := run(t, b, probe{py: slowMemoryBomb}); r.end.Outcome != airlock.OOM || r.end.Signal != "SIGKILL" || r.end.ExitCode != -1 {
				t.Errorf("got %+v, stderr %q", r.end, r.err)
			}
			alive(t, b)
		}
	})
	t.Run("memory: root is bounded too", func(t *testing.T) {
		b := h.create(t, nil, nil)
		if r := run(t, b, probe{py: slowMemoryBomb, user: "root"}); r.end.Outcome != airlock.OOM {
			t.Errorf("got %+v, stderr %q", r.end, r.err)
		}
		alive(t, b)
	})
	t.Run("memory: behind the soft limit stands a wall", func(t *testing.T) {
		b := h.create(t, nil, func(hello *channel.Hello) { hello.MemoryBytes = 0 })
		// The host may end the bomb a moment before the whole.
		if r, err := tryExec(t.Context(), b.mux, channel.StartRequest{Cmd: "/usr/bin/python3", Args: []string{"-c", memoryBomb}}, ""); err == nil && r.end.Signal != "SIGKILL" {
			t.Errorf("the bomb ended like a program: %+v", r.end)
		}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		if exit, err := b.Wait(ctx); err != nil || exit.Outcome != airlock.SandboxOOM {
			t.Errorf("wait: %+v, %v", exit, err)
		}
	})
	t.Run("memory: shm is bounded", func(t *testing.T) {
		b := h.create(t, nil, nil)
		r := run(t, b, probe{sh: `head -c 2G /dev/zero > /dev/shm/x; rm -f /dev/shm/x`})
		if !strings.Contains(r.err, "No space left") && r.end.Outcome != airlock.OOM {
			t.Errorf("got %+v", r)
		}
		alive(t, b)
	})
	t.Run("disk: full is an error and the sandbox lives", func(t *testing.T) {
		b := h.create(t, nil, nil)
		r := run(t, b, probe{sh: fmt.Sprintf(`head -c %dM /dev/zero > /home/user/big; echo code $?; rm /home/user/big; echo again > /home/user/small && cat /home/user/small`, b.spec.Limits.DiskMB+64)})
		if r.out != "code 1\nagain\n" || !strings.Contains(r.err, "No space left on device") {
			t.Errorf("got %+v", r)
		}
	})
	t.Run("disk: more than memory may be written", func(t *testing.T) {
		b := h.create(t, func(s *isolation.Spec) { s.Limits.MemoryMB, s.Limits.DiskMB = 128, 400 }, nil)
		probe{sh: `head -c 350M /dev/zero > /tmp/big && stat -c %s /tmp/big`, want: "367001600"}.check(t, b)
		alive(t, b)
	})
	t.Run("disk: all of tmp, home and usr count together", func(t *testing.T) {
		b := h.create(t, nil, nil)
		half := b.spec.Limits.DiskMB/2 + 16
		r := run(t, b, probe{user: "root", sh: fmt.Sprintf(`head -c %dM /dev/zero > /tmp/a && echo one; head -c %dM /dev/zero > /usr/b || echo full`, half, half)})
		if r.out != "one\nfull\n" {
			t.Errorf("got %+v", r)
		}
	})
	t.Run("processes: a fork bomb of the user", func(t *testing.T) {
		b := h.create(t, nil, nil)
		bomb(t, b, "user")
	})
	t.Run("processes: a fork bomb of root", func(t *testing.T) {
		b := h.create(t, nil, nil)
		bomb(t, b, "root")
	})
	t.Run("open files are bounded", func(t *testing.T) {
		b := h.create(t, nil, nil)
		probe{py: `
fs = []
try:
    while True: fs.append(open("/dev/null"))
except OSError as e:
    print(e.errno, len(fs) < 70)`, want: "24 True"}.check(t, b)
	})
	t.Run("processor time is bounded", func(t *testing.T) {
		b := h.create(t, func(s *isolation.Spec) { s.Limits.CPUs = 0.5 }, nil)
		before, err := b.Stats(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		run(t, b, probe{py: `
import time, threading
def burn():
    end = time.time() + 2
    while time.time() < end: pass
ts = [threading.Thread(target=burn) for _ in range(4)]
[t.start() for t in ts]; [t.join() for t in ts]`})
		after, err := b.Stats(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		used, wall := after.CPUSeconds-before.CPUSeconds, time.Since(start).Seconds()
		if used > 0.75*wall || used < 0.05 {
			t.Errorf("used %.2f s of %.2f s with half a processor", used, wall)
		}
	})
	t.Run("processors are shown as many as there are", func(t *testing.T) {
		b := h.create(t, func(s *isolation.Spec) { s.Limits.CPUs = 1 }, nil)
		probe{sh: `nproc`, want: "1"}.check(t, b)
	})
	t.Run("output without end is not kept", func(t *testing.T) {
		b := h.create(t, nil, nil)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		s, err := b.mux.Open(ctx, channel.MethodStart, channel.StartRequest{Cmd: "/usr/bin/yes"})
		if err != nil {
			t.Fatal(err)
		}
		for range 1000 {
			if _, _, err := s.Recv(ctx); err != nil {
				t.Fatal(err)
			}
		}
		s.Close()
		alive(t, b)
		if _, err := channel.Call[channel.Empty](ctx, b.mux, channel.MethodSignal, channel.SignalRequest{ProcessRef: first(t, b), Signal: 9}); err != nil {
			t.Error(err)
		}
	})
	t.Run("a reader that does not read stops the writer only", func(t *testing.T) {
		b := h.create(t, nil, nil)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		s, err := b.mux.Open(ctx, channel.MethodStart, channel.StartRequest{Cmd: "/usr/bin/yes"})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		time.Sleep(200 * time.Millisecond)
		for range 5 {
			alive(t, b)
		}
	})
}

func first(t *testing.T, b *box) channel.ProcessRef {
	t.Helper()
	list, err := channel.CallAll[channel.ProcessInfo](t.Context(), b.mux, channel.MethodProcesses, channel.Empty{}, 100)
	if err != nil || len(list) == 0 {
		t.Fatalf("processes: %+v, %v", list, err)
	}
	return channel.ProcessRef{PID: list[0].PID}
}

// bomb forks without end, is killed, and the sandbox must live.
func bomb(t *testing.T, b *box, user string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s, err := b.mux.Open(ctx, channel.MethodStart, channel.StartRequest{User: user, Cmd: "/usr/bin/python3", Args: []string{"-c", `
import os, time
failed = 0
while failed < 20:
    try:
        if os.fork() == 0:
            while True:
                try: os.fork()
                except OSError: time.sleep(0.05)
    except OSError as e:
        failed += 1
        print("refused", e.errno, flush=True)
        time.sleep(0.05)
time.sleep(600)`}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for {
		tag, body, err := s.Recv(ctx)
		if err != nil {
			t.Fatalf("the bomb: %v", err)
		}
		if tag == channel.TagStdout && strings.Contains(string(body), "refused 11") {
			break
		}
		if tag == channel.TagEnded {
			t.Fatalf("the bomb ended: %s", body)
		}
	}
	if _, err := channel.Call[channel.Empty](ctx, b.mux, channel.MethodSignal, channel.SignalRequest{ProcessRef: first(t, b), Signal: 9}); err != nil {
		t.Errorf("kill the bomb: %v", err)
	}
	alive(t, b)
	waitFor(t, b, `pgrep -c python3`, "0")
}

func hostile(t *testing.T, h Harness) {
	b := h.create(t, nil, nil)
	other := h.create(t, nil, nil)
	run(t, other, probe{sh: `echo neighbour-secret > /tmp/secret; echo neighbour-secret > /home/user/secret`})
	host, port, _ := strings.Cut(h.Host.TCP, ":")
	for _, p := range []probe{
		{name: "planted files cannot be read by root", user: "root", sh: `cat ` + strings.Join(h.Host.Files, " ") + ` 2>/dev/null; echo end`, want: "end"},
		{name: "no path leads to a planted text", user: "root", sh: `grep -r -s -l --devices=skip ` + quoteSplit(h.Host.Canary) + ` /usr/local /etc /root /home /var /opt /srv /mnt /media /run /tmp; echo end`, want: "end"},
		{name: "home, root and var are its own", user: "root", sh: `ls /home; ls -A /root; ls /var/lib | grep -vx dpkg | wc -l`, want: "user\n0"},
		{name: "no shadow, no host accounts", user: "root", sh: `cat /etc/shadow 2>/dev/null; cut -d: -f3 /etc/passwd | while read id; do [ $id -lt 100 ] || echo $id; done; ls /etc/sudoers /etc/ssh /etc/ssl/private 2>/dev/null; echo end`, want: "1000\n65534\nend"},
		{name: "writes to usr stay inside", user: "root", sh: `echo x > ` + h.Host.Written + ` && cat ` + h.Host.Written, want: "x"},
		{name: "root's symlinks and proc lead nowhere", user: "root", sh: `ln -s / /tmp/r; ls /tmp/r/home /proc/1/root/home /proc/self/root/home /proc/1/cwd/home; cat /proc/1/root` + h.Host.Files[0] + ` 2>/dev/null; echo end`,
			want: "/proc/self/root/home:\nuser\n\n/tmp/r/home:\nuser\nend"},
		{name: "a neighbour's files are not there", user: "root", sh: `cat /tmp/secret /home/user/secret 2>/dev/null; grep -rs neighbour-secret /tmp /home /dev/shm /run; echo end`, want: "end"},
		{name: "only the loopback device", user: "root", sh: `cat /proc/net/dev | tail -n +3 | awk '{print $1}'; cat /proc/net/route | tail -n +2 | wc -l`, want: "lo:\n0"},
		{name: "the host's loopback is another", py: `
import socket
s = socket.socket(); s.settimeout(5)
print(s.connect_ex(("` + host + `", ` + port + `)))`, want: "111"},
		{name: "no address answers", py: `
import socket
for a in ("169.254.169.254", "10.0.0.1", "192.168.0.1", "8.8.8.8"):
    s = socket.socket(); s.settimeout(2)
    try: print(s.connect_ex((a, 80)) != 0)
    except OSError: print(True)
    u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try: u.sendto(b"x", (a, 53)); print("sent")
    except OSError: print(True)`, want: strings.TrimSpace(strings.Repeat("True\n", 8))},
		{name: "no names resolve", py: `
import socket
try: print(socket.getaddrinfo("example.com", 80))
except OSError as e: print("no")`, want: "no"},
		{name: "raw and packet sockets are refused", user: "root", py: `
import socket
for f, k, p in ((socket.AF_INET, socket.SOCK_RAW, 1), (socket.AF_PACKET, socket.SOCK_RAW, 768)):
    try: socket.socket(f, k, p); print("open")
    except OSError: print("refused")`, want: "refused\nrefused"},
		{name: "the host's abstract sockets are others", user: "root", py: `
import socket
s = socket.socket(socket.AF_UNIX)
print(s.connect_ex("\0` + h.Host.Abstract + `"))`, want: "111"},
		{name: "the host's socket files cannot be connected", user: "root", py: `
import socket
s = socket.socket(socket.AF_UNIX)
print(s.connect_ex("` + h.Host.SocketFile + `") != 0)`, want: "True"},
		{name: "no container engine, no kvm, no disks", user: "root", sh: `ls /var/run/docker.sock /run/docker.sock /run/containerd /dev/kvm /dev/mem /dev/kmem /dev/vda /dev/sda /dev/nvme0n1 /dev/net/tun /dev/fuse 2>/dev/null; echo end`, want: "(/dev/net/tun\n|/dev/fuse\n)*end"},
		{name: "device nodes made inside lead nowhere", user: "root", sh: `mknod /tmp/d b 254 0 2>/dev/null && head -c1 /tmp/d 2>/dev/null; mknod /tmp/m c 1 1 2>/dev/null && head -c1 /tmp/m 2>/dev/null; echo end`, want: "end"},
		{name: "mounts of the host's filesystems are refused", user: "root", sh: `mkdir -p /tmp/mnt; for fs in ext4 xfs btrfs cgroup cgroup2 nfs 9p; do mount -t $fs /dev/vda /tmp/mnt 2>/dev/null && echo $fs; done; mount --bind /usr /tmp/mnt 2>/dev/null && echo bind; echo end`, want: "end"},
		{name: "kernel settings cannot be written", user: "root", sh: `for f in /proc/sys/kernel/core_pattern /proc/sys/kernel/modprobe /proc/sys/vm/drop_caches /proc/sysrq-trigger /sys/kernel/uevent_helper; do (echo x > $f) 2>/dev/null && echo $f; done; echo end`, want: "end"},
		{name: "the host name cannot be changed outside", user: "root", sh: `(echo evil > /proc/sys/kernel/hostname) 2>/dev/null; hostname evil 2>/dev/null; echo end`, want: "end"},
		{name: "modules, reboot, kexec, bpf, perf and userfaultfd are refused", user: "root", py: `
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for nr, args in ((175, (0, 0, 0)), (313, (0, 0, 0)), (169, (0xfee1dead, 672274793, 0x1234567, 0)), (246, (0, 0, 0, 0)), (321, (0, 0, 0)), (298, (0, 0, -1, -1, 0)), (323, (0,)), (425, (8, 0))):
    print(libc.syscall(nr, *args) == -1)`, want: strings.TrimSpace(strings.Repeat("True\n", 8))},
		{name: "the clock cannot be set", user: "root", sh: `date -s '2001-01-01' >/dev/null 2>&1 && echo set; date +%Y`, want: `20[2-9][0-9]`},
		{name: "PID 1 cannot be signalled by the user and does not mind root's requests", sh: `kill -KILL 1 2>/dev/null || echo refused; sudo sh -c 'for s in TERM INT HUP QUIT USR1; do kill -$s 1; done'; sleep 0.1; echo end`, want: "refused\nend"},
		{name: "PID 1 cannot be traced or read", py: `
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.ptrace(16, 1, 0, 0))
for f in ("/proc/1/mem", "/proc/1/environ", "/proc/1/fd/3"):
    try: open(f, "rb").read(1); print("read", f)
    except OSError: print("refused")`, want: "-1\nrefused\nrefused\nrefused"},
		{name: "the channel is not reachable, for root neither", user: "root", py: `
import os, socket, ctypes
libc = ctypes.CDLL(None, use_errno=True)
print([l for l in (os.readlink("/proc/self/fd/" + f) for f in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + f)) if "socket" in l])
try: os.open("/proc/1/fd/3", os.O_RDWR); print("open")
except OSError: print("refused")
pidfd = libc.syscall(434, 1, 0)
print(libc.syscall(438, pidfd, 3, 0) if pidfd >= 0 else -1)
print(libc.ptrace(16, 1, 0, 0))`, want: regexp.QuoteMeta("[]") + "\nrefused\n-1\n-1"},
		{name: "setuid programs of the host are nobody's", sh: `for f in /usr/bin/su /usr/bin/passwd /usr/bin/mount; do [ -u $f ] && stat -c %u $f; done | sort -u | grep -v 65534; echo end`, want: "end"},
		{name: "deep trees and long names are bounded errors", py: `
import os
os.makedirs("/tmp/deep", exist_ok=True); os.chdir("/tmp/deep")
try:
    for i in range(3000): os.mkdir("d"); os.chdir("d")
    print("deep")
except OSError as e: print("error")
try: open("/tmp/" + "n" * 5000, "w"); print("long")
except OSError as e: print(e.errno)`, want: "(deep|error)\n36"},
		{name: "many files", py: `
import os
os.makedirs("/tmp/many", exist_ok=True)
n = 0
try:
    for i in range(5000): open("/tmp/many/%d" % i, "w").close(); n += 1
except OSError: pass
print(n > 100)`, want: "True"},
		{name: "hard links and renames over planted names", user: "root", sh: `ln ` + h.Host.Files[0] + ` /tmp/hard 2>/dev/null && cat /tmp/hard 2>/dev/null; cp ` + h.Host.Files[0] + ` /tmp/cp 2>/dev/null && cat /tmp/cp; chmod 644 ` + h.Host.Files[0] + ` 2>/dev/null; cat ` + h.Host.Files[0] + ` 2>/dev/null; mv ` + h.Host.Files[0] + ` /tmp/mv 2>/dev/null; cat /tmp/mv 2>/dev/null; chown 1000 ` + h.Host.Files[0] + ` 2>/dev/null; cat ` + h.Host.Files[0] + ` 2>/dev/null; echo end`, want: "end"},
	} {
		t.Run(p.name, func(t *testing.T) { p.check(t, b) })
	}
	t.Run("nothing written inside is on the host", func(t *testing.T) {
		if h.Host.Exists(h.Host.Written) {
			t.Errorf("%s exists on the host", h.Host.Written)
		}
		probe{user: "root", sh: `ls ` + h.Host.Written + ` 2>/dev/null; echo end`, want: "end"}.check(t, other)
		for _, f := range h.Host.Files {
			if !h.Host.Exists(f) {
				t.Errorf("%s is gone from the host", f)
			}
		}
	})
	t.Run("root kills everything and the sandbox goes on", func(t *testing.T) {
		k := h.create(t, nil, nil)
		// The shell may be killed by its own call; what counts is the next.
		exec(t, k.mux, channel.StartRequest{User: "root", Cmd: "/bin/bash", Args: []string{"-c", `kill -9 -1`}})
		alive(t, k)
		probe{sh: `echo x > ~/f && cat ~/f`, want: "x"}.check(t, k)
	})
	t.Run("root that kills PID 1 ends its own sandbox only", func(t *testing.T) {
		k := h.create(t, nil, nil)
		if _, err := tryExec(t.Context(), k.mux, channel.StartRequest{User: "root", Cmd: "/bin/bash", Args: []string{"-c", `kill -9 1; sleep 60`}}, ""); err == nil {
			t.Error("the command ended like a program")
		}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		if exit, err := k.Wait(ctx); err != nil || exit.Outcome != airlock.SandboxFailed {
			t.Errorf("wait: %+v, %v", exit, err)
		}
		alive(t, other)
	})
	t.Run("a sandbox full of work ends whole", func(t *testing.T) {
		before := h.Left()
		k := h.create(t, nil, nil)
		for _, sh := range []string{
			`while :; do head -c 20M /dev/zero > /tmp/$RANDOM; done`,
			`trap '' TERM INT HUP; while :; do :; done`,
			`for i in $(seq 20); do (setsid sleep 600 &); done; sleep 600`,
		} {
			s, err := k.mux.Open(t.Context(), channel.MethodStart, channel.StartRequest{Cmd: "/bin/bash", Args: []string{"-c", sh}})
			if err != nil {
				t.Fatal(err)
			}
			if _, _, err := s.Recv(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if err := k.Destroy(t.Context()); err != nil {
			t.Fatal(err)
		}
		same(t, h, before)
	})
}

// quoteSplit writes a word so that the command line that looks for it does
// not contain it.
func quoteSplit(word string) string { return word[:len(word)/2] + "''" + word[len(word)/2:] }

"""Looks for anything of the host: secrets, homes, sockets, processes, network.

Prints what it found and ends with the number of finds.
"""

import os
import socket
import urllib.request

found = []


def tries(what, attempt):
    try:
        result = attempt()
    except OSError as error:
        print(f"  {what:<44} {error.strerror or error}")
        return
    if result:
        found.append(what)
        print(f"  {what:<44} FOUND {str(result)[:60]!r}")
    else:
        print(f"  {what:<44} nothing there")


def read(path):
    with open(path, "rb") as f:
        return f.read(80)


def connect(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.settimeout(2)
        s.connect(address)
        return address


def fetch(url):
    with urllib.request.urlopen(url, timeout=5) as answer:  # a refusal is an OSError
        return answer.read(80)


for directory in ("/root", "/var/lib", "/var/log", "/boot", "/srv", "/mnt", "/media"):
    # What of /usr is a package is no secret: apt in a sandbox needs to know.
    tries(f"list {directory}", lambda: [d for d in os.listdir(directory) if d != "dpkg"])
tries("homes of others", lambda: [d for d in os.listdir("/home") if d != "user"])
tries("read /etc/shadow", lambda: [line for line in read("/etc/shadow").splitlines() if b"$" in line])
for path in ("/etc/ssh/ssh_host_ed25519_key", "/root/.ssh/id_rsa", "/root/.bash_history", "/proc/kcore", "/dev/mem", "/dev/kvm", "/dev/sda", "/dev/vda"):
    tries(f"read {path}", lambda: read(path))
for path in ("/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock", "/run/systemd/private", "/var/lib/airlock/airlock.sock"):
    tries(f"connect to {path}", lambda: connect(socket.AF_UNIX, path))
tries("processes of the host", lambda: [p for p in os.listdir("/proc") if p.isdigit() and int(p) > 1 and os.readlink(f"/proc/{p}/ns/pid") != os.readlink("/proc/self/ns/pid")])
tries("the host's file system through /proc/1/root", lambda: [d for d in os.listdir("/proc/1/root/root")])
tries("the cloud's metadata service", lambda: fetch("http://169.254.169.254/latest/meta-data/"))
tries("a neighbour in a private network", lambda: fetch("http://10.0.0.3/"))
tries("the gateway's own machine", lambda: connect(socket.AF_INET, ("10.0.0.1", 22)))
tries("an interface besides its own", lambda: [name for _, name in socket.if_nameindex() if name not in ("lo", "eth0")])

print(f"{len(found)} found")
raise SystemExit(len(found))

#!/usr/bin/env python3
"""Verifies a directory of Airlock audit logs. Needs none of Airlock's code.

usage: verify.py [--head FILE]... LOG_DIR VKEY...

LOG_DIR  the directory with one tlog-tiles log for each period (".../audit/log")
VKEY     the key of the first period, from "airlock audit keys", kept by you; and of
         the first one behind those that retention dropped, which can't vouch for it
--head   a checkpoint that you kept or that a witness gives you: the log must
         still contain it (nothing else finds a log that was put back as a whole)

Each later period's key is vouched for by the last event of the one before.
Prints a line for each problem, and "note:" for what is worth knowing. Exits with 0 if
nothing is wrong, 1 if something is, 2 if it was called wrongly. It needs Python 3.9 and
the package "cryptography" (for Ed25519 only). The format is in docs/AUDIT.md.
"""
import argparse, base64, hashlib, json, os, re, stat, sys
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

SHARD = re.compile(r"([0-9]{4})-(?:Q([1-4])|(0[1-9]|1[0-2])(?:-(0[1-9]|[12][0-9]|3[01]))?)(?:\.([2-9]|[1-9][0-9]{1,5}))?")
problems = 0


class Bad(Exception):
    """A kind of problem and what it is."""


def say(kind, where, what):
    print(f"{kind}: {where}: {what}".encode("unicode_escape").decode())


def problem(kind, where, what):
    global problems
    say(kind, where, what)
    if (problems := problems + 1) >= 1000:
        print("FAILED: 1000 problems, and perhaps more")
        sys.exit(1)


def read(name, most):
    """The bytes of a regular file below the log's directory, never through a symbolic link."""
    path = os.path.join(base, *name.split("/"))
    try:
        if os.path.realpath(path) != path or not stat.S_ISREG(os.lstat(path).st_mode):
            raise Bad("altered", "it is a symbolic link, or behind one, or no file")
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as f:
            data = f.read(most + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise Bad("absent", "the file is not there")
    except OSError as e:
        raise Bad("unreadable", e.strerror)
    if len(data) > most:
        raise Bad("altered", "it is larger than such a file can be")
    return data


def path_of(shard, level, n, width):
    """Where a tile, or a bundle of entries, is that has width of 256."""
    path = f"{n % 1000:03d}"
    while n >= 1000:
        n //= 1000
        path = f"x{n % 1000:03d}/{path}"
    return f"{shard}/tile/{level}/{path}" + (f".p/{width}" if width < 256 else "")


def split(data, level, items):
    """Adds the entries of a bundle, or the hashes of a tile, to items."""
    at = 0
    while at < len(data):
        begin, size = (at + 2, int.from_bytes(data[at:at + 2], "big")) if level == "entries" else (at, 32)
        at = begin + size
        if at > len(data):
            raise Bad("altered", f"it breaks off behind {len(items)} whole entries")
        items.append(data[begin:at])


def row(shard, level, n, width):
    """The name of a tile or bundle, and as many of its hashes or entries as can be read.
    A part may have been replaced by the whole, when the row had grown."""
    name, items = path_of(shard, level, n, width), []
    try:
        most = 256 * 65537 if level == "entries" else 8192
        try:
            data, count = read(name, most), width
        except Bad as e:
            whole = path_of(shard, level, n, 256)
            if e.args[0] != "absent" or not os.path.lexists(os.path.join(base, whole)):
                raise
            name, data, count = whole, read(whole, most), 256
        split(data, level, items)
        if len(items) != count:
            raise Bad("altered", f"it has {len(items)} entries instead of {count}")
    except Bad as e:
        problem(e.args[0], name, e.args[1])
        items = items if level == "entries" else []
    return name, items[:width]


def earlier(shard, level, n, good):
    """Compares files that are left from when a tile or bundle was shorter: each is its beginning."""
    path = path_of(shard, level, n, 256) + ".p"
    try:
        widths = os.listdir(os.path.join(base, path))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as e:
        return problem("unreadable", path, e.strerror)
    for width in sorted(int(w) for w in widths if re.fullmatch("[1-9][0-9]{0,2}", w) and int(w) < len(good)):
        items = []
        try:
            split(read(f"{path}/{width}", 256 * 65537 if level == "entries" else 8192), level, items)
            if (list(map(leaf, items)) if level == "entries" else items) != good[:width]:
                raise Bad("altered", "it is from when the file above it was shorter, and is not its beginning")
        except Bad as e:
            if e.args[0] != "absent":  # removed meanwhile, as it may be
                problem(e.args[0], f"{path}/{width}", e.args[1])


def leaf(entry):
    return hashlib.sha256(b"\0" + entry).digest()


def root(hashes):
    """RFC 6962, section 2.1, from hashes of subtrees of one size; only the last may be smaller."""
    if None in hashes:
        return None
    stack = []
    for n, h in enumerate(hashes, 1):
        while n % 2 == 0:
            h, n = hashlib.sha256(b"\1" + stack.pop() + h).digest(), n // 2
        stack.append(h)
    h = stack.pop() if stack else hashlib.sha256(b"").digest()
    while stack:
        h = hashlib.sha256(b"\1" + stack.pop() + h).digest()
    return h


class Key:
    def __init__(self, vkey):
        self.text, (self.name, self.id, key) = vkey, vkey.split("+", 2)
        key = base64.b64decode(key, validate=True)
        if len(key) != 33 or key[0] != 1 or hashlib.sha256(self.name.encode() + b"\n" + key).hexdigest()[:8] != self.id:
            raise ValueError("not an Ed25519 key of a log")
        self.public = Ed25519PublicKey.from_public_bytes(key[1:])

    def signed(self, note):
        text, signatures = note.rsplit("\n\n", 1)
        for line in signatures.split("\n"):
            try:
                dash, name, sig = line.split(" ")
                sig = base64.b64decode(sig, validate=True)
                if (dash, name, sig[:4].hex()) == ("\u2014", self.name, self.id):
                    self.public.verify(sig[4:], text.encode() + b"\n")
                    return True
            except (ValueError, InvalidSignature):
                pass  # another line may be good
        return False


def checkpoint(note):
    """Origin, size and root of a checkpoint, whose signature is still to be checked."""
    m = re.fullmatch(r"([^\n]+)\n(0|[1-9][0-9]{0,14})\n([A-Za-z0-9+/]{43}=)\n\n(?:\u2014 [^\s+]+ [A-Za-z0-9+/]+={0,2}\n)+", note)
    if not m:
        raise ValueError("not a checkpoint")
    return m[1], int(m[2]), base64.b64decode(m[3])


def event(entry):
    """Type and field "log" of an event that is about the log."""
    try:
        e = json.loads(entry)
        return str(e["type"]), dict(e["log"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return "another", {}


def contents(shard, first, size, want, kept):
    """Hashes a shard's entries and compares all its files. Returns its first number and, as
    far as they are what was signed, its first and last event and drops by index, and the
    roots of the sizes in kept."""
    said, hashes, events, roots, level = {}, [], {}, {}, 1
    while size >> 8 * level:  # said: what the tiles above the lowest say
        count = size >> 8 * level
        said[level] = []
        for n in range((count + 255) // 256):
            width = min(256, count - n * 256)
            said[level] += row(shard, level, n, width)[1] or [None] * width
        level += 1
    for n in range((size + 255) // 256):
        width = min(256, size - n * 256)
        name, entries = row(shard, "entries", n, width)
        tile, below = row(shard, 0, n, width)
        leaves = [leaf(e) for e in entries]
        ours, theirs = root(leaves) if len(leaves) == width else None, root(below) if below else None

        def fits(h):  # with what is above
            return h is not None and (said[1][n] == h if width == 256 else root(hashes + [h]) == want)
        best = ours if ours and (fits(ours) or not fits(theirs)) else theirs
        good = leaves if ours and best == ours else below
        if below and best != theirs:
            differ = next(i for i in range(width) if leaves[i] != below[i])
            problem("altered", tile, f"hash {differ} is not that of the event below it")
        number = re.match(rb'\{"v":1,"seq":(0|[1-9][0-9]{0,18}),', entries[0]) if entries else None
        if n == 0 and number and good and leaves[0] == good[0]:
            first = int(number[1])  # whether that is right, the links say
        for i, entry in enumerate(entries[:len(good)], n * 256):
            if leaves[i % 256] != good[i % 256]:
                problem("altered", f"{name} event {first + i}", f"its hash is not the one in {tile}")
            elif not entry.startswith(b'{"v":1,"seq":%d,' % (first + i)):
                problem("out_of_order", f"{name} event {first + i}", "it does not begin with this number")
            elif i in (0, size - 1) or b'"type":"retention.drop"' in entry:
                events[i] = event(entry)
        for kind in ("entries", 0):
            earlier(shard, kind, n, good or [])
        roots.update({k: root(hashes + [root(good[:k - n * 256])]) for k in kept if good and n * 256 < k <= n * 256 + width})
        hashes.append(best if best or width < 256 else said[1][n])
    full = size // 256
    if full and root(hashes) != want and root(said[1] + hashes[full:]) == want:
        bad = [n for n in range(full) if hashes[n] != said[1][n]]
        for n in bad:
            problem("altered", path_of(shard, "entries", n, 256), f"of the events from {first + n * 256} on some are not those that were signed; {path_of(shard, 0, n, 256)} was altered, too")
        hashes[:full], roots, events = said[1], {}, {i: e for i, e in events.items() if i // 256 not in bad}
    if root(hashes) != want:
        problem("altered", f"{shard}/checkpoint", f"the {size} events do not hash to the root that it signs")
        return first, {}, {}
    for level, above in said.items():
        for i, (h, s) in enumerate(zip(hashes, above)):
            if s and h != s:
                problem("altered", path_of(shard, level, i // 256, min(256, len(above) - i // 256 * 256)), f"hash {i % 256} is not that of what is below it")
        for i in range(0, len(above), 256):
            earlier(shard, level, i // 256, hashes[i:min(i + 256, len(above))])
        hashes = [root(hashes[i:i + 256]) for i in range(0, len(above), 256)]
    return first, events, roots


def unsigned(shard, size):
    """How many entries lie behind the checkpoint."""
    end, n = size, size // 256
    while os.path.isfile(path := os.path.join(base, path_of(shard, "entries", n, 256))):
        n, end = n + 1, n * 256 + 256
    if os.path.isdir(path + ".p"):
        end = max([end] + [n * 256 + int(w) for w in os.listdir(path + ".p") if re.fullmatch("[1-9][0-9]{0,2}", w)])
    return end - size


def summary(s):
    return s["shard"], s["first"], s["size"], base64.b64encode(s["root"]).decode()


def verify(shard, before, named, given, heads):
    """Checks one shard. Returns what the others have to agree with."""
    at = f"{shard}/checkpoint"
    this = {"shard": shard, "first": before["first"] + (before["size"] or 0) if before else 0, "size": None,
            "installation": None, "key": None, "last": ("", {}), "dropped": False, "drops": []}
    try:
        note = read(at, 65536).decode()
        origin, size, want = checkpoint(note)
        name = re.fullmatch("airlock/([a-z2-7]{20})/" + re.escape(shard), origin)
        if not name or before and before["installation"] not in (None, name[1]):
            raise Bad("altered", f"it is the checkpoint of {origin}")
        key = given.get(origin, named)
        this.update(installation=name[1], dropped=size > 0 and not os.path.lexists(os.path.join(base, shard, "tile")))
        if key and named and key.text != named.text:
            raise Bad("altered", f"the last event of the period before names another key, {named.text}")
        if key and not key.signed(note):
            raise Bad("altered", f"it is not signed by {key.text}")
    except Bad as e:
        return problem(e.args[0], at, e.args[1]) or this
    except ValueError:
        return problem("altered", at, "it is not a checkpoint") or this
    if not key and not this["dropped"]:
        problem("unsigned", at, "nothing vouches for its key: give it")
    this.update(size=size, root=want, key=key)
    kept, roots = {}, {}
    for text in heads.get(origin, []) if key else ():
        if not key.signed(text):
            problem("unsigned", at, "a head that was kept is not signed by the key and says nothing")
        else:
            kept[checkpoint(text)[1]] = checkpoint(text)[2]
    if not this["dropped"]:
        this["first"], events, roots = contents(shard, this["first"], size, want, kept)
        if 0 in events:
            opened(this, before, *events[0])
        if key:
            this["drops"] = [(this["first"] + i, log) for i, (kind, log) in events.items() if kind == "retention.drop"]
            this["last"] = events.get(size - 1, ("", {}))
        if behind := unsigned(shard, size):
            say("note", at, f"{behind} events are behind it and not signed yet")
    for k, digest in kept.items():
        here = want if k == size else root([]) if k == 0 else roots.get(k)
        if k > size:
            problem("rolled_back", at, f"a head of {k} events was kept and it signs {size}")
        elif here is None and this["dropped"]:
            say("note", at, f"a head of {k} events that was kept can't be compared")
        elif here != digest:
            problem("forked", at, f"its first {k} events are not those of a head that was kept")
    return this


def opened(this, before, kind, log):
    """Compares a shard's first event with the shard and the one before."""
    at, said = f"{this['shard']} event {this['first']}", log.get("previous")
    if kind != "log.open" or log.get("shard") != this["shard"] or log.get("first") != this["first"]:
        problem("altered", at, "it does not open this part of the log")
    elif this["key"] and log.get("vkey") != this["key"].text:
        problem("altered", at, f"it names another key, {log.get('vkey')}")
    elif not isinstance(said, dict):
        if before or this["first"]:
            problem("absent", at, "it names no part before it")
    elif not before or said.get("shard") != before["shard"]:
        problem("absent", said.get("shard"), f"{at} says that this part came before it")
    elif before["size"] is not None and tuple(map(said.get, ("shard", "first", "size", "root"))) != summary(before):
        size = said.get("size")
        problem("rolled_back" if isinstance(size, int) and before["size"] < size else "forked", f"{before['shard']}/checkpoint",
                f"it signs {before['size']} events, and {at} says that the part had {size} and the root {said.get('root')}")


def order(shard):
    """The day its period begins, the longer period first, and its number."""
    year, quarter, month, day, number = SHARD.fullmatch(shard).groups()
    return year, int(month or int(quarter) * 3 - 2), int(day or 1), 0 if quarter else 2 if day else 1, int(number or 1)


def main():
    global base
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--head", action="append", default=[], metavar="FILE")
    args.add_argument("log_dir")
    args.add_argument("vkey", nargs="+")
    opts, heads, done, named = args.parse_args(), {}, [], None
    try:
        given = {k.name: k for k in map(Key, opts.vkey)}
        for file in opts.head:
            with open(file, encoding="utf-8", newline="") as f:
                text = f.read(65536)
            heads.setdefault(checkpoint(text)[0], []).append(text)
        base = os.path.realpath(opts.log_dir)
        names = sorted(os.listdir(base))
    except (OSError, ValueError) as e:
        args.error(f"{e}: give a directory, keys as NAME+ID+KEY, and whole checkpoints")
    shards = sorted((d for d in names if SHARD.fullmatch(d)), key=order)
    for name in names:
        if name not in shards and name != "lock":
            say("note", name, "it does not belong to the log")
    if shards and not any(os.path.lexists(os.path.join(base, shards[-1], f)) for f in ("checkpoint", "tile")):
        say("note", shards.pop(), "it was begun and has nothing in it")
    if not shards:
        problem("absent", opts.log_dir, "there is no log")
    for shard, following in zip(shards, shards[1:] + [None]):
        this = verify(shard, done[-1] if done else None, named, given, heads)
        done.append(this)
        (kind, log), named = this["last"], None
        if kind == "log.close" and log.get("next") != following:
            problem("absent", log.get("next"), f"the last event of {shard} says that this part comes next")
        elif kind == "log.close":
            try:
                named = Key(str(log.get("nextVkey")))
            except ValueError:
                problem("altered", shard, "its last event names no key for the next part")
        elif following and (kind or this["size"] == 0):
            problem("altered", shard, f"its last event does not close it, and {following} follows")
    drops = [(seq, tuple(map(log.get, ("shard", "first", "size", "root")))) for s in done for seq, log in s["drops"]]
    for s in done:
        if s["dropped"] and s["size"] and not any(seq >= s["first"] + s["size"] and drop == summary(s) for seq, drop in drops):
            problem("absent", f"{s['shard']}/tile", "the events are gone and no event says that retention dropped them so")
    there = {f"airlock/{s['installation']}/{s['shard']}" for s in done}
    for origin in sorted(heads.keys() - there):
        problem("rolled_back", origin, "a head of it was kept, and it is not here")
    for origin in sorted(given.keys() - there):
        say("note", origin, "a key of it was given, and it is not here")
    if problems:
        print(f"FAILED: {problems} problem" + "s" * (problems != 1))
        return 1
    print(f"OK: {sum(s['size'] for s in done if not s['dropped'])} events in {len(done)} parts; the newest has {done[-1]['size']} and the root {summary(done[-1])[3]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Verifies a directory of Airlock audit logs. Needs none of Airlock's code.

usage: verify.py [--head FILE]... LOG_DIR VKEY...

LOG_DIR  the directory with one tlog-tiles log for each period (".../audit/log")
VKEY     the key of the first period, from "airlock audit keys", kept by you; and of
         a period whose predecessor was dropped, which cannot vouch for it any more
--head   a checkpoint that you kept or that a witness gives you: the log must
         still contain it (this is what finds a log that was put back)

Each later period's key is vouched for by the last entry of the one before.
Prints a line for each problem and exits with 1; exits with 0 if there is none.
It needs Python 3.9 and the package "cryptography" (for Ed25519 only).
Formats: docs/AUDIT.md; c2sp.org/tlog-tiles, c2sp.org/signed-note; RFC 6962.
"""
import argparse, base64, hashlib, json, os, re, sys
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

problems = []


def problem(kind, where, what):
    problems.append((kind, where, what))
    print(f"{kind}: {where}: {what}".encode("unicode_escape").decode())


def read(path):
    """The bytes of a file; None, with a problem, if it is absent or unreadable."""
    try:
        if os.path.islink(path):
            raise OSError("it is a symbolic link")
        with open(path, "rb") as f:
            return f.read(32 << 20)
    except FileNotFoundError:
        problem("absent", path, "the file is not there")
    except OSError as e:
        problem("unreadable", path, str(e))


def leaf(data):
    return hashlib.sha256(b"\0" + data).digest()


def node(left, right):
    return hashlib.sha256(b"\1" + left + right).digest()


def root(hashes):
    """RFC 6962 section 2.1, without recursion: perfect subtrees on a stack."""
    stack = []
    for n, h in enumerate(hashes, 1):
        while n % 2 == 0:
            h, n = node(stack.pop(), h), n // 2
        stack.append(h)
    if not stack:
        return hashlib.sha256(b"").digest()
    h = stack.pop()
    while stack:
        h = node(stack.pop(), h)
    return h


class Key:
    def __init__(self, vkey):
        self.name, self.hash, key = vkey.split("+", 2)
        key = base64.b64decode(key)
        if key[0] != 1 or hashlib.sha256(self.name.encode() + b"\n" + key).hexdigest()[:8] != self.hash:
            raise ValueError(f"{vkey!r} is not an Ed25519 verification key")
        self.public = Ed25519PublicKey.from_public_bytes(key[1:])

    def open(self, note):
        """The text of a signed note that this key signed, or an exception."""
        text, signatures = note.decode().rsplit("\n\n", 1)
        text += "\n"
        for line in signatures.splitlines():
            _, name, sig = line.split(" ")
            sig = base64.b64decode(sig)
            if name == self.name and sig[:4].hex() == self.hash:
                self.public.verify(sig[4:], text.encode())
                return text
        raise ValueError("it has no signature of the key " + self.name)


def checkpoint(text):
    origin, size, digest = text.split("\n")[:3]
    return origin, int(size), base64.b64decode(digest)


def tile_path(level, n, width):
    path = f"{n % 1000:03d}"
    while n >= 1000:
        n //= 1000
        path = f"x{n % 1000:03d}/{path}"
    return f"tile/{level}/{path}" + (f".p/{width}" if width < 256 else "")


def entries_of(data):
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at:at + 2], "big")
        if at + 2 + size > len(data):
            raise ValueError("an entry is cut off")
        yield data[at + 2:at + 2 + size]
        at += 2 + size


def verify_shard(directory, shard, key, heads):
    """Returns what the next shard has to agree with, or None if that is unknown."""
    base = os.path.join(directory, shard)
    note = read(os.path.join(base, "checkpoint"))
    if note is None:
        return None
    try:
        origin, size, want = checkpoint(key.open(note))
    except (InvalidSignature, ValueError, IndexError) as e:
        return problem("altered", f"{shard}/checkpoint", f"its signature does not hold: {e or 'wrong'}")
    if origin != key.name:
        problem("altered", f"{shard}/checkpoint", f"it is of {origin}, not of {key.name}")
    here = [checkpoint(h) for h in heads if checkpoint(h)[0] == origin]
    if not os.path.isdir(os.path.join(base, "tile")) and size > 0:
        return {"dropped": shard, "size": size, "root": want}

    hashes, first, last, drops = [], None, b"", []
    for n in range((size + 255) // 256):
        width = min(256, size - n * 256)
        at = tile_path("entries", n, width)
        bundle, level0 = read(os.path.join(base, at)), read(os.path.join(base, tile_path(0, n, width)))
        try:
            entries = list(entries_of(bundle or b""))
        except ValueError as e:
            problem("altered", f"{shard}/{at}", str(e))
            entries = []
        if bundle is not None and len(entries) != width:
            problem("altered", f"{shard}/{at}", f"it has {len(entries)} entries and should have {width}")
        for i, entry in enumerate(entries):
            index = n * 256 + i
            h = leaf(entry)
            hashes.append(h)
            if level0 is not None and level0[i * 32:i * 32 + 32] != h:
                problem("altered", f"{shard} entry {index}", "it does not match its hash in " + tile_path(0, n, width))
            number = re.match(rb'\{"v":1,"seq":(0|[1-9][0-9]*),', entry)
            if not number:
                problem("altered", f"{shard} entry {index}", "it does not begin as an event")
                continue
            if first is None:
                first = int(number[1]) - index
            if int(number[1]) != first + index:
                problem("out_of_order", f"{shard} entry {index}", f"it has the number {int(number[1])}, not {first + index}")
            if b'"type":"retention.drop"' in entry:
                drops.append(json.loads(entry)["log"])
            last = entry
        hashes += [b"\0" * 32] * (width - len(entries))
    if root(hashes) != want:
        problem("altered", shard, f"its {size} entries do not hash to the root that was signed")
    # The tiles above the leaves, which proofs are made of.
    level, below = 1, hashes
    while len(below) >= 256:
        below = [root(below[i:i + 256]) for i in range(0, len(below) // 256 * 256, 256)]
        for n in range((len(below) + 255) // 256):
            part = below[n * 256:n * 256 + 256]
            at = tile_path(level, n, len(part))
            data = read(os.path.join(base, at))
            if data is not None and data != b"".join(part):
                problem("altered", f"{shard}/{at}", "it does not match the entries")
        level += 1
    for _, kept, digest in here:
        if kept > size:
            problem("rolled_back", shard, f"it has {size} entries and the head that was kept has {kept}")
        elif root(hashes[:kept]) != digest:
            problem("rolled_back", shard, f"its first {kept} entries are others than those of the head that was kept")
    out = {"shard": shard, "first": first, "size": size, "root": want, "drops": drops, "origin": origin}
    if size:
        try:
            out["open"] = json.loads(next(entries_of(open(os.path.join(base, tile_path("entries", 0, min(256, size))), "rb").read())))
            out["last"] = json.loads(last)
        except (OSError, ValueError, StopIteration):
            pass  # told above
    return out


def order(shard):
    period, _, number = shard.partition(".")
    return period, int(number or 1)


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--head", action="append", default=[], metavar="FILE")
    args.add_argument("log_dir")
    args.add_argument("vkey", nargs="+")
    args = args.parse_args()
    given = {key.name.rsplit("/", 1)[-1]: key for key in map(Key, args.vkey)}
    heads, key = [open(h).read() for h in args.head], None
    shards = sorted((d for d in os.listdir(args.log_dir) if re.fullmatch(r"[0-9][-0-9Q]*(\.[0-9]+)?", d)), key=order)
    if not shards:
        problem("absent", args.log_dir, "there is no log")
    previous, dropped, drops, total, seen = None, [], [], 0, set()
    for i, shard in enumerate(shards):
        key = given.get(shard, key)
        result = verify_shard(args.log_dir, shard, key, heads) if key else problem("altered", shard, "no key vouches for it")
        if result is None:
            previous = key = None
            continue
        seen.add(key.name)
        if "dropped" in result:
            dropped.append(result)
        else:
            total += result["size"]
            drops += result["drops"]
            said = result.get("open", {}).get("log", {}).get("previous")
            if previous and said and (said["size"] != previous["size"] or base64.b64decode(said["root"]) != previous["root"]):
                problem("altered", shard, f"it was begun after {said['size']} entries of the period before, which now has {previous['size']} or others")
            if previous and not said and result["size"]:
                problem("altered", shard, "it does not name the period before")
            if not previous and said and i == 0:
                problem("absent", said["shard"], "this period comes before the first that is here")
        closed = result.get("last", {})
        previous = result
        if i + 1 < len(shards):
            vouched = closed.get("log", {}).get("nextVkey") if closed.get("type") == "log.close" else None
            key = Key(vouched) if vouched else None
            if not vouched and "dropped" not in result:
                problem("altered", shard, "it is not the last one and does not end with log.close")
        elif closed.get("type") == "log.close":
            problem("absent", closed["log"]["next"], "the period after the last one that is here")
    for d in dropped:
        if not any(x["shard"] == d["dropped"] and x["size"] == d["size"] and base64.b64decode(x["root"]) == d["root"] for x in drops):
            problem("absent", d["dropped"], "its entries are gone and no later event says that retention dropped them")
    for origin, size, _ in map(checkpoint, heads):
        if origin not in seen:
            problem("absent", origin, f"a head of it with {size} entries was kept, and there is no such log")
    if problems:
        print(f"FAILED: {len(problems)} problems")
        return 1
    print(f"OK: {total} events in {len(shards)} logs; the newest head is {previous['origin']} {previous['size']} {base64.b64encode(previous['root']).decode()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

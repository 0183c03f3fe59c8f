package index

import (
	"slices"
	"strings"
)

// types are those of the events that Airlock writes, see docs/AUDIT.md, and of
// the acts that its policies know.
var types = []string{
	"app.approve", "app.end", "app.propose", "app.revoke", "app.run",
	"approval.deny", "approval.grant",
	"audit.details",
	"db.call", "db.connect", "db.define", "db.delete", "db.end", "db.insert", "db.select", "db.update",
	"dns.end", "dns.resolve",
	"exec.attach", "exec.end", "exec.input", "exec.list", "exec.output", "exec.resize", "exec.signal", "exec.start",
	"file.download", "file.end", "file.list", "file.mkdir", "file.move", "file.remove", "file.stat", "file.watch", "file.write",
	"hold.release", "hold.set",
	"http.end", "http.request",
	"key.create", "key.end", "key.revoke",
	"log.boot", "log.clock", "log.close", "log.gap", "log.open", "log.rotate",
	"net.connect", "net.end",
	"policy.load",
	"port.end", "port.serve",
	"retention.drop",
	"sandbox.budget", "sandbox.changed", "sandbox.connect", "sandbox.create", "sandbox.end", "sandbox.fork", "sandbox.get", "sandbox.kill", "sandbox.list", "sandbox.logs",
	"sandbox.metrics", "sandbox.network", "sandbox.pause", "sandbox.resume", "sandbox.snapshot", "sandbox.start", "sandbox.timeout",
	"secret.end", "secret.remove", "secret.rotate", "secret.set", "secret.use",
	"subject.erase", "subject.erased",
}

// Types returns the types that a query may name, sorted.
func Types() []string { return slices.Clone(types) }

// knownType says whether an event can have the type, or one with the text
// before a last *.
func knownType(v string) bool {
	head, open := strings.CutSuffix(v, "*")
	return v == "" || slices.ContainsFunc(types, func(t string) bool { return t == v || open && strings.HasPrefix(t, head) })
}

// closeTypes says which types may have been meant.
func closeTypes(v string) string {
	head, _, _ := strings.Cut(strings.TrimSuffix(v, "*"), ".")
	var near, family, families []string
	for _, t := range types {
		of, _, _ := strings.Cut(t, ".")
		if distance(t, v) <= 2 {
			near = append(near, t)
		}
		if of == head {
			family = append(family, t)
		}
		if !slices.Contains(families, of+".*") {
			families = append(families, of+".*")
		}
	}
	for _, some := range [][]string{near, family} {
		if len(some) == 1 {
			return "use " + some[0]
		} else if len(some) > 1 {
			return "use " + oneOf(some)
		}
	}
	return "use " + oneOf(families)
}

// distance is how many letters must be changed, put in or left out to make one
// word of another.
func distance(a, b string) int {
	if max(len(a), len(b)) > 64 { // none of ours is so long
		return max(len(a), len(b))
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		before := row[0]
		row[0] = i + 1
		for j := range len(b) {
			change := before
			if a[i] != b[j] {
				change++
			}
			before = row[j+1]
			row[j+1] = min(change, row[j+1]+1, row[j]+1)
		}
	}
	return row[len(b)]
}

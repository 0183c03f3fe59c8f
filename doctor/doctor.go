// Package doctor says what this machine offers to Airlock and what to do about
// each lack. It tries things instead of reading versions: it makes a user
// namespace, mounts proc, makes a cgroup and runs a guest under KVM, each in a
// child process or undone at once.
//
// The same findings stop the server: see Fatal. A program that calls Check or
// Required must call Main first, since the probes are that program executed
// again. Start reading at Check.
package doctor

import (
	"context"
	"strings"

	"airlock.dev/airlock"
)

// State is how a finding is to be taken.
type State string

// The states. A server does not start with Fail; Warn costs something or stops
// a later part of Airlock.
const (
	OK   State = "ok"
	Warn State = "warn"
	Fail State = "fail"
)

// Finding is one thing that was looked at.
type Finding struct {
	Name   string `json:"name"`
	State  State  `json:"state"`
	Detail string `json:"detail"`           // what was found
	Remedy string `json:"remedy,omitempty"` // what to do, unless State is OK
}

// Check looks at everything. It takes up to three seconds where KVM hangs.
func Check(ctx context.Context, dataDir string) []Finding {
	return append(Required(ctx, dataDir), optional(ctx)...)
}

// Required looks at what sandboxes cannot do without, and is quick. Whatever
// can stop a server is in it.
func Required(ctx context.Context, dataDir string) []Finding {
	return []Finding{
		user(),
		program("/proc/self/exe"),
		kernel(),
		cgroups(),
		userNamespace(ctx),
		procMount(ctx),
		seccompFilters(),
		tracing(),
		dataDirectory(dataDir),
		memory(),
		openFiles(),
		processIDs(),
	}
}

func optional(ctx context.Context) []Finding {
	return append(tools(), kvm(ctx))
}

// Fatal returns an error with every failed finding and its remedy, or nil if
// none failed.
func Fatal(findings []Finding) error {
	var what, hints []string
	for _, f := range findings {
		if f.State != Fail {
			continue
		}
		what = append(what, f.Name+": "+f.Detail)
		hints = append(hints, f.Remedy)
	}
	if what == nil {
		return nil
	}
	e := airlock.Errorf(airlock.Unavailable, "this machine cannot run sandboxes: %s", strings.Join(what, "; "))
	e.Hint = strings.Join(hints, "; ")
	return e
}

func ok(name, detail string) Finding { return Finding{Name: name, State: OK, Detail: detail} }

func warn(name, detail, remedy string) Finding {
	return Finding{Name: name, State: Warn, Detail: detail, Remedy: remedy}
}

func fail(name, detail, remedy string) Finding {
	return Finding{Name: name, State: Fail, Detail: detail, Remedy: remedy}
}

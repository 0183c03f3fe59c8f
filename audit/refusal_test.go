package audit

import (
	"context"
	"errors"
	"testing"

	"airlock.dev/airlock"
)

// TestNotRecorded: what clients see of a log that cannot take an event.
func TestNotRecorded(t *testing.T) {
	full := airlock.Errorf(airlock.Exhausted, "the write-ahead log in /var/lib/airlock is full")
	for _, c := range []struct {
		name string
		err  error
		want airlock.Code
	}{
		{"full", full, airlock.Unavailable},
		{"no space", airlock.Errorf(airlock.NoSpace, "no space"), airlock.Unavailable},
		{"anything", errors.New("input/output error"), airlock.Unavailable},
		{"the client went", context.Canceled, airlock.Canceled},
		{"the client's time is over", context.DeadlineExceeded, airlock.Deadline},
	} {
		err := notRecorded(c.err)
		if airlock.CodeOf(err) != c.want {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	var shown *airlock.Error
	if !errors.As(notRecorded(full), &shown) || shown.Public() != "refused: the audit log cannot take it: the operator finds the reason with: airlock audit status" {
		t.Errorf("%q", shown.Public())
	}
}

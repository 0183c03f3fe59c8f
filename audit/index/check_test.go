package index_test

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	"airlock.dev/airlock/audit/index"
	"github.com/google/go-cmp/cmp"
)

// An insider edits the file so that Open does not mind; Check names the events.
func TestCheckNamesAlterations(t *testing.T) {
	one := func(seqs ...uint64) index.Finding { return index.Finding{Count: uint64(len(seqs)), Seqs: seqs} }
	const begin = "UPDATE state SET first = 3; DELETE FROM event WHERE seq < 3; DELETE FROM subject WHERE seq < 3"
	for _, test := range []struct {
		name, sql string
		want      index.Report
		damage    string
	}{
		{name: "nothing", sql: "SELECT 1", want: index.Report{Next: 8, Compared: 8}},
		{name: "an effect", sql: "UPDATE event SET effect = 1 WHERE seq = 5", want: index.Report{Next: 8, Compared: 8, Differ: one(5)}},
		{name: "an effect taken away", sql: "UPDATE event SET effect = NULL WHERE seq = 5", want: index.Report{Next: 8, Compared: 8, Differ: one(5)}},
		{name: "an effect put in", sql: "UPDATE event SET effect = 2 WHERE seq = 4", want: index.Report{Next: 8, Compared: 8, Differ: one(4)}},
		{name: "a time", sql: "UPDATE event SET time = time - 1 WHERE seq IN (1, 6)", want: index.Report{Next: 8, Compared: 8, Differ: one(1, 6)}},
		{name: "what it completes", sql: "UPDATE event SET of = 3 WHERE seq = 7", want: index.Report{Next: 8, Compared: 8, Differ: one(7)}},
		{name: "a word of another field", sql: "UPDATE event SET team = (SELECT id FROM word WHERE text = CAST('i1' AS BLOB)) WHERE seq = 2", want: index.Report{Next: 8, Compared: 8, Differ: one(2)}},
		{name: "a word that is not there", sql: "UPDATE event SET team = 999 WHERE seq = 2", want: index.Report{Next: 8, Compared: 8, Differ: one(2)}},
		{name: "a word", sql: "UPDATE word SET text = CAST('exec.stop' AS BLOB) WHERE text = CAST('exec.start' AS BLOB)", want: index.Report{Next: 8, Compared: 8, Differ: one(3, 6, 7)}},
		{name: "a subject taken away", sql: "DELETE FROM subject WHERE seq = 7", want: index.Report{Next: 8, Compared: 8, Differ: one(7)}},
		{name: "a subject put in", sql: "INSERT INTO subject SELECT 3, word FROM subject WHERE seq = 7", want: index.Report{Next: 8, Compared: 8, Differ: one(3)}},
		{name: "a subject of no event", sql: "INSERT INTO subject SELECT 300, word FROM subject WHERE seq = 7", want: index.Report{Next: 8, Compared: 8, Extra: one(300)}},
		{name: "events taken out of the middle", sql: "DELETE FROM event WHERE seq IN (2, 4)", want: index.Report{Next: 8, Compared: 6, Absent: one(2, 4)}},
		{name: "the first events taken away", sql: begin, want: index.Report{Next: 8, Compared: 5, Absent: one(0, 1, 2)}},
		{name: "the last events taken away", sql: "DELETE FROM event WHERE seq > 5; DELETE FROM subject WHERE seq > 5; UPDATE state SET next = 6", want: index.Report{Next: 6, Compared: 6}},
		{name: "an event put behind the end", sql: "INSERT INTO event (seq, time) VALUES (8, 5), (9, 5); UPDATE state SET next = 10", want: index.Report{Next: 10, Compared: 8, Extra: one(8, 9)}},
		{name: "a span made narrow", sql: "UPDATE span SET latest = earliest", want: index.Report{Next: 8, Compared: 8}, damage: "the times of the events from 0 to 4095 are not those of the log"},
		{name: "a span taken away", sql: "DELETE FROM span", want: index.Report{Next: 8, Compared: 8}, damage: "the times of the events from 0 to 4095"},
		// An index of SQLite's that disagrees with its table hides events from queries.
		{
			name: "an entry of an SQLite index taken away",
			sql: "PRAGMA writable_schema = ON; UPDATE sqlite_schema SET sql = replace(sql, 'WHERE of IS NOT NULL', 'WHERE of = 1') WHERE name = 'event_of'; PRAGMA writable_schema = RESET;" +
				"REINDEX event_of; PRAGMA writable_schema = ON; UPDATE sqlite_schema SET sql = replace(sql, 'WHERE of = 1', 'WHERE of IS NOT NULL') WHERE name = 'event_of'",
			want: index.Report{Next: 8, Compared: 8}, damage: "missing from index event_of",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			x, path := small(t)
			if err := x.Close(); err != nil {
				t.Fatal(err)
			}
			change(t, path, test.sql)
			if x = open(t, path); x.Replaced() != "" {
				t.Fatalf("replaced: %s", x.Replaced())
			}
			report := check(t, x, events)
			damage := strings.Join(report.Damage, "\n")
			if (test.damage == "") != (damage == "") || !strings.Contains(damage, test.damage) {
				t.Errorf("damage %q, want %q", damage, test.damage)
			}
			report.Damage = nil
			if diff := cmp.Diff(test.want, report); diff != "" {
				t.Errorf("report (-want +got):\n%s", diff)
			}
		})
	}
}

func TestCheckOfAnotherLog(t *testing.T) {
	x, _ := small(t)
	longer := append(slices.Clone(events), generate(8, 5000)...)
	if report := check(t, x, longer); !report.OK() || report.Next != 8 || report.Compared != 8 {
		t.Errorf("an index that lags behind: %+v", report)
	}
	if report := check(t, x, events[2:6]); !cmp.Equal(report.Extra, index.Finding{Count: 4, Seqs: []uint64{0, 1, 6, 7}}) || report.Compared != 4 {
		t.Errorf("a log that lacks some: %+v", report)
	}
	if report := check(t, x, nil); report.Extra.Count != 8 || report.Compared != 0 {
		t.Errorf("no log: %+v", report)
	}
	if report := check(t, x, longer[10:]); report.Extra.Count != 8 || report.Compared != 0 {
		t.Errorf("a log that begins behind: %+v", report)
	}
	if report, err := x.Check(t.Context(), 5, log(events[:5])); err != nil || !report.OK() || report.Next != 5 || report.Compared != 5 {
		t.Errorf("a log that is read to a place below the index's end: %+v, %v", report, err)
	}
	if report, err := x.Check(t.Context(), 0, log(nil)); err != nil || !report.OK() || report.Next != 0 || report.Compared != 0 {
		t.Errorf("nothing of the log: %+v, %v", report, err)
	}
	unreadable := errors.New("cannot read")
	for name, rows := range map[string]func(context.Context, uint64, int) ([]index.Row, error){
		"it cannot be read": func(context.Context, uint64, int) ([]index.Row, error) { return nil, unreadable },
		"with a gap":        func(context.Context, uint64, int) ([]index.Row, error) { return []index.Row{events[0], events[2]}, nil },
		"not going on":      func(context.Context, uint64, int) ([]index.Row, error) { return events[:3], nil },
	} {
		if report, err := x.Check(t.Context(), math.MaxUint64, rows); err == nil || name == "it cannot be read" && !errors.Is(err, unreadable) {
			t.Errorf("%s: %v, %+v", name, err, report)
		}
	}
}

// A report is bounded, whatever was done to the index.
func TestCheckNamesTheFirst(t *testing.T) {
	x, path := small(t)
	rows := append(slices.Clone(events), generate(8, 2000)...)
	add(t, x, rows[8:])
	if err := x.Close(); err != nil {
		t.Fatal(err)
	}
	change(t, path, "UPDATE event SET status = 2 WHERE seq >= 8 AND seq % 2 = 0", "DELETE FROM event WHERE seq % 2 = 1 AND seq < 2000")
	x = open(t, path)
	report := check(t, x, rows)
	if report.Differ.Count != 1000 || len(report.Differ.Seqs) != 100 || report.Differ.Seqs[99] != 206 || report.Absent.Count != 1000 || len(report.Absent.Seqs) != 100 {
		t.Errorf("%+v", report)
	}
}

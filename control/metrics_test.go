package control

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/cluster"
	"airlock.dev/airlock/image"
	"airlock.dev/airlock/isolation/fake"
	"airlock.dev/airlock/policy"
)

func TestHistory(t *testing.T) {
	var h history
	if _, found := h.last(); found || len(h.between(time.Time{}, time.Now())) != 0 {
		t.Error("an empty history has metrics")
	}
	start := time.Unix(1_000_000, 0)
	at := func(i int) time.Time { return start.Add(time.Duration(i) * sampleEvery) }
	const n = samplesMost + 100
	for i := range n {
		h.add(Metric{Time: at(i), DiskUsed: int64(i)}, float64(i))
	}
	all := h.between(time.Time{}, at(n))
	if len(all) != samplesMost || len(h.ring) != samplesMost {
		t.Errorf("%d of %d metrics are kept, want %d", len(all), n, samplesMost)
	}
	for i, m := range all {
		if m.DiskUsed != int64(i+100) {
			t.Fatalf("metric %d is %d", i, m.DiskUsed)
		}
	}
	if m, found := h.last(); !found || m.DiskUsed != int64(n-1) {
		t.Errorf("the last is %d", m.DiskUsed)
	}
	if got := h.between(at(200), at(202)); len(got) != 3 || got[0].DiskUsed != 200 {
		t.Errorf("a range, both ends included: %+v", got)
	}
}

func TestSample(t *testing.T) {
	plenty := Capacity{MemoryMB: 4000, DiskMB: 10000, Processes: 2000, Descriptors: 1000, Sandboxes: 5}
	c, err := New(t.Context(), Config{
		Store: cluster.NewMemory(), Driver: fake.New(fake.NewWorld()), Image: image.Image{RootFS: "/", Guest: "/guest"}, Host: plenty, Team: plenty, Log: slog.New(slog.DiscardHandler),
		Boundary: Boundary{Policies: policy.Builtin, Trail: Unrecorded{}},
	})
	if err == nil {
		err = c.Recover(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(true)
	p, other := airlock.Principal{Team: "alice", KeyID: "a"}, airlock.Principal{Team: "bob", KeyID: "b"}
	sb, err := c.Create(t.Context(), p, CreateRequest{Timeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	if _, found := c.LastMetric(t.Context(), p, sb.ID); found {
		t.Error("a metric before the first sample")
	}
	if g, err := c.Open(t.Context(), sb.ID); err != nil {
		t.Error(err)
	} else if m, err := g.Metric(t.Context()); err != nil || m.MemoryUsed != 1<<20 {
		t.Errorf("now: %+v, %v", m, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	c.sample(ctx, 10*time.Millisecond)
	all, err := c.Metrics(t.Context(), p, sb.ID, time.Time{}, time.Now())
	if err != nil || len(all) < 5 {
		t.Fatalf("%d metrics, %v", len(all), err)
	}
	// The fake has used 10 ms of processor time at its start, and none since.
	if first, last := all[0], all[len(all)-1]; first.CPUPercent <= 0 || first.CPUPercent > 100 || last.CPUPercent != 0 ||
		last.MemoryUsed != 1<<20 || last.MemoryMost != 512<<20 || last.DiskMost != 1024<<20 || !last.Time.After(first.Time) {
		t.Errorf("first %+v, last %+v", first, last)
	}
	if _, err := c.Metrics(t.Context(), other, sb.ID, time.Time{}, time.Now()); airlock.CodeOf(err) != airlock.NotFound {
		t.Errorf("another team's: %v", err)
	}
	if _, found := c.LastMetric(t.Context(), other, sb.ID); found {
		t.Error("another team reads the last metric")
	}
}

package control

import (
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/image"
)

func TestDemand(t *testing.T) {
	start := time.Unix(1_000_020, 0) // a slot begins
	for _, tt := range []struct {
		name string
		at   []time.Duration // when somebody asks
		now  time.Duration
		want int
	}{
		{"nobody", nil, 0, 0},
		{"once", []time.Duration{0}, time.Second, 0},
		{"one after the other", []time.Duration{0, 2 * time.Second, 5 * time.Second}, 6 * time.Second, 1},
		{"at one time", []time.Duration{0, 0, 0, 2 * time.Second}, 3 * time.Second, 3},
		{"still in the window", []time.Duration{0, 0}, 9*time.Minute + 59*time.Second, 2},
		{"over", []time.Duration{0, 0}, 10 * time.Minute, 0},
		{"the larger one is over", []time.Duration{0, 0, 0, 5 * time.Minute, 5*time.Minute + time.Second}, 11 * time.Minute, 1},
		{"long ago, and once again", []time.Duration{0, 0, 2 * time.Hour}, 2 * time.Hour, 0},
	} {
		var d demand
		for _, at := range tt.at {
			d.add(start.Add(at))
		}
		if got := d.wants(start.Add(tt.now)); got != tt.want {
			t.Errorf("%s: %d, want %d", tt.name, got, tt.want)
		}
	}
}

// However many kinds are asked for, few are counted, and those that somebody
// asks for again stay.
func TestKindsAreBounded(t *testing.T) {
	p := newPool(PoolSize{Most: 1}, newAdmission(Capacity{}, Capacity{}))
	often := airlock.DefaultLimits
	for i := range 10 * stocksMost {
		other := often
		other.MemoryMB = 1000 + i
		p.take(image.Image{}, often)
		p.take(image.Image{}, other)
	}
	if len(p.stocks) > stocksMost || p.stocks[kindOf(image.Image{}, often)] == nil {
		t.Errorf("%d kinds are counted, the usual one among them: %v", len(p.stocks), p.stocks[kindOf(image.Image{}, often)] != nil)
	}
	output := often
	output.OutputBytes = 17
	if kindOf(image.Image{}, often) != kindOf(image.Image{}, output) {
		t.Error("what drivers do not see makes another kind")
	}
}

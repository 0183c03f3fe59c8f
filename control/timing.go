package control

import "time"

// Timing is where the time of a create went. It is made by who asks for it, and
// read when Create has returned; a nil one measures nothing.
type Timing struct {
	Steps []Step
	last  time.Time
}

// Step is one part, in order. What ran at the same time is in one.
type Step struct {
	// Name is what was done: image, take (from the pool), decide (and record),
	// reserve, remember, groups, kernel (of the sandbox), guest (is started),
	// channel (it answers), greet (it is told its settings), door.
	Name string
	Took time.Duration
}

// NewTiming begins now.
func NewTiming() *Timing { return &Timing{last: time.Now()} }

// step ends one.
func (t *Timing) step(name string) {
	if t == nil {
		return
	}
	now := time.Now()
	t.Steps = append(t.Steps, Step{name, now.Sub(t.last)})
	t.last = now
}

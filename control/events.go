package control

import (
	"sync"
	"time"
)

// Event is one thing that happened to a sandbox through the API, or that it
// tried outside.
type Event struct {
	Time    time.Time
	Level   string // "info", "warn" or "error"
	Message string
	Fields  map[string]string
}

// maxEvents bounds what is kept of one sandbox, in the server's memory and
// for its life; the audit trail is what lasts.
const maxEvents = 1000

type events struct {
	mu  sync.Mutex
	all []Event
}

func (e *events) add(level, message string, fields map[string]string) {
	if e == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.all) >= maxEvents {
		e.all = append(e.all[:0], e.all[len(e.all)-maxEvents+1:]...)
	}
	e.all = append(e.all, Event{Time: time.Now().UTC(), Level: level, Message: message, Fields: fields})
}

func (e *events) list() []Event {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]Event(nil), e.all...)
}

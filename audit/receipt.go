package audit

import (
	"sync/atomic"

	"airlock.dev/airlock"
)

// Receipt says that the event of a permitted act is durable. Only Log.Append
// makes one that is worth something. What performs a crossing takes a Receipt
// and spends it first, so that no crossing can be written that was not
// decided and recorded: the zero value, a denied act, another act and a
// second use are all refused.
type Receipt struct{ r *receipt }

type receipt struct {
	seq    uint64
	call   Call
	effect string
	spent  atomic.Bool
}

// Seq is the number of the event; an outcome refers to it.
func (r Receipt) Seq() uint64 {
	if r.r == nil {
		return 0
	}
	return r.r.seq
}

// Spend allows one performance of the act, by its action and resource.
func (r Receipt) Spend(action string, resource Entity) error {
	switch {
	case r.r == nil:
		return airlock.Errorf(airlock.Internal, "refused: %.60s was not recorded before it was to happen", action)
	case r.r.effect != Permit:
		return airlock.Errorf(airlock.Denied, "refused: %.60s was not permitted", action)
	case r.r.call.Action != action || r.r.call.Resource != resource:
		return airlock.Errorf(airlock.Internal, "refused: %.60s on another resource than was recorded, or another act", action)
	case r.r.spent.Swap(true):
		return airlock.Errorf(airlock.Internal, "refused: %.60s was recorded once and was to happen twice", action)
	}
	return nil
}

package policy

import (
	"iter"
	"slices"
	"time"
)

// Recorded is one decision as the audit trail has it.
type Recorded struct {
	Seq      uint64    `json:"seq"`
	Time     time.Time `json:"time"`
	Facts    Facts     `json:"facts"`
	Call     Call      `json:"call"`
	Request  string    `json:"request,omitempty"` // text of the request's set; empty if there was none
	Decision Decision  `json:"decision"`
}

// Change is a recorded act that a draft would decide otherwise.
type Change struct {
	Seq   uint64    `json:"seq"`
	Time  time.Time `json:"time"`
	Facts Facts     `json:"facts"`
	Call  Call      `json:"call"`
	Was   Decision  `json:"was"`
	Would Decision  `json:"would"`
}

// maxReplaySets bounds how many sets of requests a replay keeps parsed.
const maxReplaySets = 256

// Replay decides recorded acts again, with the operator's policies replaced by
// a draft, and yields exactly those whose effect or obligations would be
// others, in the order in which they come. Which policies decide, and the
// words of the reason, may change without being a change. A request that no
// longer passes the validator denies.
func Replay(draft *Policies, recorded iter.Seq[Recorded]) iter.Seq[Change] {
	return func(yield func(Change) bool) {
		requests := map[string]*Set{}
		for r := range recorded {
			e := Effective{Ceiling: draft.For(r.Facts.Team)}
			would := Decision{}
			if r.Request != "" {
				set, known := requests[r.Request]
				if !known {
					if len(requests) >= maxReplaySets {
						clear(requests)
					}
					set, _ = Parse("request", []byte(r.Request))
					requests[r.Request] = set
				}
				e.Request = set
				if set == nil {
					would = Decision{Effect: Deny, Set: e.Digest(), Reason: "the policies of the request are no longer valid: the schema has changed since"}
				}
			}
			if would.Effect == "" {
				would = e.Decide(r.Facts, r.Call)
			}
			if would.Effect == r.Decision.Effect && slices.Equal(would.Obligations, r.Decision.Obligations) {
				continue
			}
			if !yield(Change{Seq: r.Seq, Time: r.Time, Facts: r.Facts, Call: r.Call, Was: r.Decision, Would: would}) {
				return
			}
		}
	}
}

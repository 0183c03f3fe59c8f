package policy

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cedar-policy/cedar-go"
	"github.com/cedar-policy/cedar-go/types"
)

// meeting is where each kind of obligation can be met: actions, and groups of
// them. Everywhere else it would permit what nobody can do.
var meeting = map[Kind][]string{
	KindMask:   {"db:select", "db:insert", "db:update", "db:delete"}, // the others return no columns that are known before
	KindLimit:  {"db:*"},
	KindInject: {"http:request", "secret:use"},
	KindPass:   {"net:connect"},
	KindHold:   {"dns:*", "net:*", "http:*", "secret:*", "db:*", "app:run"}, // what goes on in a sandbox does not wait
}

// meets says whether a kind of obligation can be met in an action.
func (m *model) meets(kind Kind, action string) bool {
	return slices.ContainsFunc(meeting[kind], func(where string) bool {
		return m.within(cedar.NewEntityUID("Action", types.String(action)), cedar.NewEntityUID("Action", types.String(where)))
	})
}

// unmet returns for each kind of obligation of a policy that some of its
// actions cannot meet what is wrong.
func (m *model) unmet(p *policy) (all []unmetKind) {
	for _, kind := range []Kind{KindHold, KindInject, KindLimit, KindMask, KindPass} {
		if !slices.ContainsFunc(p.obligations, func(o Obligation) bool { return o.Kind == kind }) {
			continue
		}
		var cannot []string
		for _, action := range m.actionNames() {
			if (p.actions == nil || p.actions[action]) && !m.meets(kind, action) {
				cannot = append(cannot, action)
			}
		}
		if len(cannot) == 0 {
			continue
		}
		what := cannot[0]
		if len(cannot) > 1 {
			what = fmt.Sprintf("%s and %d more of its actions", cannot[0], len(cannot)-1)
		}
		all = append(all, unmetKind{kind, what + " cannot meet @" + string(kind), "put it on a permit whose action is one of " + strings.Join(meeting[kind], ", ")})
	}
	return all
}

type unmetKind struct {
	kind          Kind
	message, hint string
}

// unmeetable returns the policies that permit an action only with what it
// cannot meet, and the first such kind. Parse refuses them; this is for a set
// that came another way.
func unmeetable(layers []layer, action string) (ids []string, first Kind) {
	for _, l := range layers {
		for _, p := range l.reasons {
			for _, o := range p.obligations {
				if theModel().meets(o.Kind, action) {
					continue
				}
				if first == "" {
					first = o.Kind
				}
				ids = append(ids, l.name+"/"+p.id)
				break
			}
		}
	}
	return ids, first
}

package policy

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/cedar-policy/cedar-go/types"
	"github.com/cedar-policy/cedar-go/x/exp/ast"
)

// Difference is what a change of policies does. Policies and Verdict follow
// from the structure of the policies and are exact, as far as every policy can
// be evaluated; Found comes from probes, which are not all calls there may be.
type Difference struct {
	Verdict  string         `json:"verdict"` // one of the constants below
	Policies []PolicyChange `json:"policies"`
	Found    []Found        `json:"foundByProbes"`
	Probes   int            `json:"probes"` // calls that were decided under both
}

// The verdicts on a difference.
const (
	SamePolicies = "the same policies"
	SameMeaning  = "other words, the same meaning"
	OnlyNarrows  = "nothing is wider, something may be narrower (exact)"
	OnlyWidens   = "nothing is narrower, something may be wider (exact)"
	BothWays     = "something may be wider and something narrower"
)

// PolicyChange is one policy that is not the same in both sets.
type PolicyChange struct {
	Policy  string `json:"policy"`
	Change  string `json:"change"`    // added, removed or changed
	Widens  bool   `json:"mayWiden"`  // false: exactly not
	Narrows bool   `json:"mayNarrow"` // false: exactly not
	Meaning string `json:"meaning"`   // in words
}

// Found is calls of one action that the two sets decide differently.
type Found struct {
	Action   string   `json:"action"`
	Was      string   `json:"was"`   // the effect with its obligations
	Would    string   `json:"would"` // the same
	Count    int      `json:"count"`
	Examples []string `json:"examples"` // at most three
}

// The bounds of a comparison.
const (
	maxProbes     = 40000 // calls in all
	maxCaseProbes = 2000  // calls for one policy, action, and type of principal and resource
	maxExamples   = 3
)

// Compare says what changes when one set takes the place of another.
func Compare(before, after *Set) Difference {
	d := Difference{Policies: []PolicyChange{}, Found: []Found{}}
	ids := slices.Concat(before.IDs(), after.IDs())
	slices.Sort(ids)
	var changed []*policy
	for _, id := range slices.Compact(ids) {
		was, is := before.byID[id], after.byID[id]
		if was != nil && is != nil && was.text() == is.text() {
			continue
		}
		c := compare(was, is)
		c.Policy = id
		d.Policies = append(d.Policies, c)
		for _, p := range []*policy{was, is} {
			if p != nil {
				changed = append(changed, p)
			}
		}
	}
	widens := slices.ContainsFunc(d.Policies, func(c PolicyChange) bool { return c.Widens })
	narrows := slices.ContainsFunc(d.Policies, func(c PolicyChange) bool { return c.Narrows })
	switch {
	case len(d.Policies) == 0:
		d.Verdict = SamePolicies
		return d
	case widens && narrows:
		d.Verdict = BothWays
	case widens:
		d.Verdict = OnlyWidens
	case narrows:
		d.Verdict = OnlyNarrows
	default:
		d.Verdict = SameMeaning
	}
	d.probe(before, after, changed)
	return d
}

// text is the policy in its canonical form.
func (p *policy) text() string { return string(p.cedar.MarshalCedar()) }

// compare says what one policy's change can do by its structure alone.
func compare(was, is *policy) PolicyChange {
	word := func(p *policy) string {
		if p.permits {
			return "permit"
		}
		return "forbid"
	}
	switch {
	case was == nil:
		c := PolicyChange{Change: "added", Widens: is.permits, Narrows: !is.permits, Meaning: "a new " + word(is)}
		if len(is.obligations) > 0 { // they bind what other policies permit, too
			c.Narrows = true
			c.Meaning += " with obligations"
		}
		return c.inWords()
	case is == nil:
		c := PolicyChange{Change: "removed", Widens: !was.permits, Narrows: was.permits, Meaning: "a " + word(was) + " less"}
		if len(was.obligations) > 0 {
			c.Widens = true
			c.Meaning += ", which had obligations"
		}
		return c.inWords()
	case was.permits != is.permits:
		return PolicyChange{Change: "changed", Widens: is.permits || len(was.obligations) > 0, Narrows: !is.permits || len(is.obligations) > 0,
			Meaning: "a " + word(was) + " became a " + word(is)}.inWords()
	}
	more, less := matches(was, is)
	c := PolicyChange{Change: "changed", Widens: more, Narrows: less}
	switch {
	case more && less:
		c.Meaning = "it applies to other calls"
	case more:
		c.Meaning = "it applies to more calls"
	case less:
		c.Meaning = "it applies to fewer calls"
	default:
		c.Meaning = "it applies to the same calls"
	}
	if !is.permits {
		c.Widens, c.Narrows = less, more
	}
	gone := slices.ContainsFunc(was.obligations, func(o Obligation) bool { return !slices.Contains(is.obligations, o) })
	added := slices.ContainsFunc(is.obligations, func(o Obligation) bool { return !slices.Contains(was.obligations, o) })
	if gone || added {
		c.Meaning += ", with other obligations"
		c.Widens, c.Narrows = c.Widens || gone, c.Narrows || added
	}
	// Where a policy with obligations applies, it binds as well as permits.
	if is.permits && len(is.obligations)+len(was.obligations) > 0 && (more || less) {
		c.Widens, c.Narrows = true, true
	}
	return c.inWords()
}

func (c PolicyChange) inWords() PolicyChange {
	switch {
	case c.Widens && c.Narrows:
		c.Meaning += ": may widen and narrow"
	case c.Widens:
		c.Meaning += ": can only widen"
	case c.Narrows:
		c.Meaning += ": can only narrow"
	default:
		c.Meaning += ": neither wider nor narrower"
	}
	return c
}

// matches says whether the new form of a policy can match calls that the old
// one did not, and the other way round. Both is the answer where the structure
// does not tell.
func matches(was, is *policy) (more, less bool) {
	a, b := (*ast.Policy)(was.cedar.AST()), (*ast.Policy)(is.cedar.AST())
	for _, s := range [][2]ast.IsScopeNode{{a.Principal, b.Principal}, {a.Resource, b.Resource}} {
		m, l := scopes(s[0], s[1])
		more, less = more || m, less || l
	}
	switch {
	case was.actions == nil && is.actions == nil:
	case was.actions == nil:
		less = true
	case is.actions == nil:
		more = true
	default:
		for id := range is.actions {
			more = more || !was.actions[id]
		}
		for id := range was.actions {
			less = less || !is.actions[id]
		}
	}
	// Every condition more is a call less. Conditions of one when that are
	// joined by && count one by one.
	old, now := conditionTexts(a), conditionTexts(b)
	for text := range now {
		less = less || !old[text]
	}
	for text := range old {
		more = more || !now[text]
	}
	return more, less
}

func conditionTexts(p *ast.Policy) map[string]bool {
	all := map[string]bool{}
	for _, c := range p.Conditions {
		for _, n := range conjuncts(c) {
			all[fmt.Sprint(bool(c.Condition), conditionText(n))] = true
		}
	}
	return all
}

func scopes(was, is ast.IsScopeNode) (more, less bool) {
	before, after := scopeText(was), scopeText(is)
	if before == after && !strings.HasSuffix(before, "…") {
		return false, false
	}
	if _, ok := was.(ast.ScopeTypeAll); ok {
		return false, true
	}
	if _, ok := is.(ast.ScopeTypeAll); ok {
		return true, false
	}
	return true, true
}

// probe decides calls under both sets. They are made of the literals of the
// policies that changed: only where one of those applies can a decision change.
func (d *Difference) probe(before, after *Set, changed []*policy) {
	m := theModel()
	was, would := Effective{Ceiling: before}, Effective{Ceiling: after}
	found := map[[3]string]*Found{}
	seen := map[string]bool{}
	looked := map[string]bool{} // what the policies that changed look at
	for _, p := range changed {
		for thing := range literalsOf((*ast.Policy)(p.cedar.AST())) {
			looked[thing] = true
		}
	}
	for _, p := range changed {
		tree := (*ast.Policy)(p.cedar.AST())
		literals := literalsOf(tree)
		for _, id := range m.actionNames() {
			if p.actions != nil && !p.actions[id] {
				continue
			}
			a := m.actions[id]
			for _, principal := range a.principals {
				for _, resource := range a.resources {
					if !ofType(tree.Principal, principal) || !ofType(tree.Resource, resource) {
						continue
					}
					for f, c := range literals.calls(id, a, principal, resource) {
						key := fmt.Sprint(f, c)
						if seen[key] {
							continue
						}
						if seen[key] = true; len(seen) > maxProbes {
							d.finish(found)
							return
						}
						d.Probes++
						x, y := was.Decide(f, c).brief(), would.Decide(f, c).brief()
						if x == y {
							continue
						}
						group := [3]string{id, x, y}
						if found[group] == nil {
							found[group] = &Found{Action: id, Was: x, Would: y}
						}
						found[group].Count++
						if len(found[group].Examples) < maxExamples {
							found[group].Examples = append(found[group].Examples, example(f, c, slices.Sorted(maps.Keys(looked))))
						}
					}
				}
			}
		}
	}
	d.finish(found)
}

func (d *Difference) finish(found map[[3]string]*Found) {
	keys := slices.SortedFunc(maps.Keys(found), func(a, b [3]string) int { return slices.Compare(a[:], b[:]) })
	for _, k := range keys {
		d.Found = append(d.Found, *found[k])
	}
}

// brief is the effect of a decision and what it obliges to.
func (d Decision) brief() string {
	text := string(d.Effect)
	for i, o := range d.Obligations {
		sep := ", "
		if i == 0 {
			sep = " with "
		}
		text += sep + string(o.Kind) + " "
		if o.Kind == KindLimit {
			text += fmt.Sprint(o.Limit)
		} else {
			text += o.Value
		}
	}
	return text
}

// example describes a call with what decided it: of the things that policies
// look at, those that it has.
func example(f Facts, c Call, things []string) string {
	text := described(c)
	if f.Team != "probe" {
		text += " of team " + shown(f.Team)
	}
	var with []string
	for _, thing := range things {
		name := thing[strings.LastIndexByte(thing, '.')+1:]
		switch v, has := c.Context[name]; {
		case strings.HasPrefix(thing, "context."):
			if s, isString := v.(string); isString {
				v = shown(s)
			}
			if has && !slices.Contains(describedContext, name) {
				with = append(with, fmt.Sprintf("%s %v", name, v))
			}
		case strings.HasPrefix(thing, "tag:") && f.Sandbox.Metadata != nil:
			key := strings.TrimPrefix(thing, "tag:")
			if label, ok := f.Sandbox.Metadata[key]; ok {
				with = append(with, fmt.Sprintf("label %s %s", shown(key), shown(label)))
			}
		case name == "role" && (c.Principal.Type == "User" || c.Principal.Type == "Agent"):
			with = append(with, "role "+shown(f.Caller.Role))
		case name == "template":
			with = append(with, "template "+shown(f.Sandbox.Template))
		}
	}
	if len(with) > 0 {
		text += " with " + strings.Join(with, ", ")
	}
	return text
}

func ofType(scope ast.IsScopeNode, typ string) bool {
	switch s := scope.(type) {
	case ast.ScopeTypeEq:
		return string(s.Entity.Type) == typ
	case ast.ScopeTypeIs:
		return string(s.Type) == typ
	case ast.ScopeTypeIsIn:
		return string(s.Type) == typ
	}
	return true
}

// literals are the values that a policy compares things with, by the thing:
// "context.port", "resource.name", "principal.role", "tag:env" for labels, and
// "Team" for the ids of entities.
type literals map[string][]any

func (l literals) add(thing string, values ...any) {
	if _, ok := l[thing]; !ok {
		l[thing] = nil
	}
	for _, v := range values {
		if !slices.Contains(l[thing], v) {
			l[thing] = append(l[thing], v)
		}
	}
}

func literalsOf(p *ast.Policy) literals {
	l := literals{}
	for _, scope := range []ast.IsScopeNode{p.Principal, p.Resource} {
		switch s := scope.(type) {
		case ast.ScopeTypeEq:
			l.add(string(s.Entity.Type), string(s.Entity.ID))
		case ast.ScopeTypeIn:
			l.add(string(s.Entity.Type), string(s.Entity.ID))
		case ast.ScopeTypeIsIn:
			l.add(string(s.Entity.Type), string(s.Entity.ID))
		}
	}
	for _, c := range p.Conditions {
		ast.Inspect(ast.NewNode(c.Body), func(n ast.IsNode) bool {
			switch t := n.(type) {
			case ast.NodeTypeLike:
				for _, thing := range things(t.Arg) {
					l.add(thing, samples(t.Value)...)
				}
			case ast.NodeTypeEquals:
				l.pair(t.Left, t.Right)
			case ast.NodeTypeNotEquals:
				l.pair(t.Left, t.Right)
			case ast.NodeTypeLessThan:
				l.pair(t.Left, t.Right)
			case ast.NodeTypeLessThanOrEqual:
				l.pair(t.Left, t.Right)
			case ast.NodeTypeGreaterThan:
				l.pair(t.Left, t.Right)
			case ast.NodeTypeGreaterThanOrEqual:
				l.pair(t.Left, t.Right)
			case ast.NodeTypeContains:
				l.pair(t.Left, t.Right)
			case ast.NodeTypeIn:
				l.pair(t.Left, t.Right)
			case ast.NodeTypeAccess:
				for _, thing := range things(t) {
					l.add(thing) // that it is looked at is enough for true and false
				}
			case ast.NodeTypeExtensionCall:
				if len(t.Args) == 2 {
					l.pair(t.Args[0], t.Args[1])
				}
			}
			return true
		})
	}
	return l
}

// pair notes that what is in one expression is compared with what is in the other.
func (l literals) pair(a, b ast.IsNode) {
	for _, side := range [][2]ast.IsNode{{a, b}, {b, a}} {
		values := constants(side[1])
		for _, thing := range things(side[0]) {
			l.add(thing, values...)
		}
		for _, v := range values {
			if e, ok := v.(types.EntityUID); ok {
				l.add(string(e.Type), string(e.ID))
			}
		}
	}
}

// things names what an expression looks at: "context.port" and so on.
func things(n ast.IsNode) []string {
	switch t := n.(type) {
	case ast.NodeTypeAccess:
		if v, ok := t.Arg.(ast.NodeTypeVariable); ok {
			return []string{string(v.Name) + "." + string(t.Value)}
		}
		// principal.app.version and resource.sandbox.template
		return []string{"." + string(t.Value)}
	case ast.NodeTypeGetTag:
		var all []string
		for _, v := range constants(t.Right) {
			if s, ok := v.(string); ok {
				all = append(all, "tag:"+s)
			}
		}
		return all
	}
	return nil
}

// constants are the values written in an expression. Addresses are strings
// here, as in a call, and a network stands for its first address, its last and
// the ones beside it.
func constants(n ast.IsNode) []any {
	var all []any
	ast.Inspect(ast.NewNode(n), func(n ast.IsNode) bool {
		switch t := n.(type) {
		case ast.NodeTypeExtensionCall:
			if len(t.Args) == 1 {
				if v, ok := t.Args[0].(ast.NodeValue); ok {
					if s, ok := v.Value.(types.String); ok {
						if t.Name == "ip" {
							all = append(all, addressesAround(string(s))...)
						} else {
							all = append(all, string(s))
						}
					}
				}
			}
			return false
		case ast.NodeValue:
			switch v := t.Value.(type) {
			case types.String:
				all = append(all, string(v))
			case types.Long:
				all = append(all, int64(v)-1, int64(v), int64(v)+1)
			case types.EntityUID:
				all = append(all, v)
			}
		}
		return true
	})
	return all
}

func addressesAround(s string) []any {
	p, ok := network(s)
	if !ok {
		return nil
	}
	first := p.Addr()
	last := lastAddress(p)
	var all []any
	for _, a := range []interface {
		IsValid() bool
		String() string
	}{first.Prev(), first, last, last.Next()} {
		if a.IsValid() {
			all = append(all, a.String())
		}
	}
	return all
}

// samples are texts that a pattern matches, and one that it just does not.
func samples(p types.Pattern) []any {
	text := string(p.MarshalCedar())
	text = strings.TrimSuffix(strings.TrimPrefix(text, `"`), `"`)
	if strings.Contains(text, `\`) {
		return nil // what is escaped is rare in names, paths and hosts
	}
	all := []any{strings.ReplaceAll(text, "*", "probe"), strings.ReplaceAll(text, "*", "")}
	if bare, ok := strings.CutPrefix(text, "*."); ok {
		all = append(all, strings.ReplaceAll(bare, "*", "probe"))
	}
	return append(all, strings.ReplaceAll(text, "*", "probe")+"x")
}

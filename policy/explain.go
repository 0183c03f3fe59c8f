package policy

import (
	"fmt"

	"github.com/cedar-policy/cedar-go"
	"github.com/cedar-policy/cedar-go/types"
	"github.com/cedar-policy/cedar-go/x/exp/ast"
)

// Explanation is a decision with what every policy had to say.
type Explanation struct {
	Decision Decision  `json:"decision"`
	Policies []Finding `json:"policies"` // the ceiling's, then the request's, each by id
}

// Finding is what one policy had to say of a call.
type Finding struct {
	Policy  string `json:"policy"` // "ceiling/ID" or "request/ID"
	File    string `json:"file"`
	Line    int    `json:"line"`
	Effect  Effect `json:"effect"`        // permit or forbid, as a Deny
	Applies bool   `json:"applies"`       // it took part in the decision
	Part    string `json:"part"`          // what made it not apply, or fail: principal, action, resource or condition; else ""
	Why     string `json:"why,omitempty"` // that in words
	Error   string `json:"error,omitempty"`
}

// Explain decides a call as Decide does and says of every policy whether it
// applied, and of those that did not the first part that kept it away.
func (e Effective) Explain(f Facts, c Call) Explanation {
	x := Explanation{Decision: e.Decide(f, c), Policies: []Finding{}}
	q, err := newQuery(f, c)
	if err != nil {
		return x // the decision's reason says it, and no policy was asked
	}
	for _, l := range []layer{{name: "ceiling", set: e.Ceiling}, {name: "request", set: e.Request}} {
		if l.set == nil {
			continue
		}
		for _, p := range l.set.policies {
			x.Policies = append(x.Policies, q.explain(l.name, p))
		}
	}
	return x
}

func (q *query) explain(layer string, p *policy) Finding {
	f := Finding{Policy: layer + "/" + p.id, File: p.file, Line: p.line, Effect: Deny}
	if p.permits {
		f.Effect = Permit
	}
	tree := (*ast.Policy)(p.cedar.AST())
	for _, part := range []struct {
		name  string
		scope ast.IsScopeNode
		is    types.EntityUID
	}{{"principal", tree.Principal, q.req.Principal}, {"action", tree.Action, q.req.Action}, {"resource", tree.Resource, q.req.Resource}} {
		if !q.inScope(part.scope, part.is) {
			f.Part = part.name
			f.Why = fmt.Sprintf("the %s %s is not %s", part.name, shown(string(part.is.Type)+"::"+string(part.is.ID)), scopeText(part.scope))
			return f
		}
	}
	for _, c := range tree.Conditions {
		word := "when"
		if c.Condition == ast.ConditionUnless {
			word = "unless"
		}
		for _, n := range conjuncts(c) {
			holds, err := q.holds(n)
			if err != nil {
				f.Part, f.Error = "condition", clipped(err.Error())
				f.Why = clipped(fmt.Sprintf("%s { %s } cannot be evaluated", word, conditionText(n)))
				return f
			}
			if holds != (c.Condition == ast.ConditionWhen) {
				f.Part = "condition"
				f.Why = clipped(fmt.Sprintf("%s { %s } is %t", word, conditionText(n), holds))
				return f
			}
		}
	}
	f.Applies = true
	return f
}

// conjuncts splits what must all be true in a when, and what must all be false
// in an unless, so that the one that is to blame can be shown alone.
func conjuncts(c ast.ConditionType) []ast.IsNode {
	var split func(n ast.IsNode) []ast.IsNode
	split = func(n ast.IsNode) []ast.IsNode {
		switch t := n.(type) {
		case ast.NodeTypeAnd:
			if c.Condition == ast.ConditionWhen {
				return append(split(t.Left), split(t.Right)...)
			}
		case ast.NodeTypeOr:
			if c.Condition == ast.ConditionUnless {
				return append(split(t.Left), split(t.Right)...)
			}
		}
		return []ast.IsNode{n}
	}
	return split(c.Body)
}

// inScope says whether an entity is what the head of a policy asks for.
func (q *query) inScope(scope ast.IsScopeNode, is types.EntityUID) bool {
	p := ast.Permit()
	switch s := scope.(type) {
	case ast.ScopeTypeAll:
		return true
	case ast.ScopeTypeEq:
		return is == s.Entity
	case ast.ScopeTypeIs:
		return is.Type == s.Type
	case ast.ScopeTypeIn:
		p.When(ast.Value(is).In(ast.Value(s.Entity)))
	case ast.ScopeTypeIsIn:
		if is.Type != s.Type {
			return false
		}
		p.When(ast.Value(is).In(ast.Value(s.Entity)))
	case ast.ScopeTypeInSet:
		list := make([]cedar.Value, len(s.Entities))
		for i, e := range s.Entities {
			list[i] = e
		}
		p.When(ast.Value(is).In(ast.Value(cedar.NewSet(list...))))
	}
	holds, err := q.holds(p.Conditions[0].Body)
	return holds && err == nil
}

// scopeText is what a head asks for, in Cedar's words.
func scopeText(scope ast.IsScopeNode) string {
	switch s := scope.(type) {
	case ast.ScopeTypeEq:
		return s.Entity.String()
	case ast.ScopeTypeIs:
		return "of type " + string(s.Type)
	case ast.ScopeTypeIn:
		return "in " + s.Entity.String()
	case ast.ScopeTypeIsIn:
		return "of type " + string(s.Type) + " in " + s.Entity.String()
	case ast.ScopeTypeInSet:
		text := "in ["
		for i, e := range s.Entities {
			if i > 0 {
				text += ", "
			}
			text += e.String()
		}
		return clipped(text + "]")
	}
	return "anything"
}

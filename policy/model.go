package policy

import (
	_ "embed"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/cedar-policy/cedar-go"
	"github.com/cedar-policy/cedar-go/types"
	"github.com/cedar-policy/cedar-go/x/exp/schema"
	"github.com/cedar-policy/cedar-go/x/exp/schema/resolved"
	"github.com/cedar-policy/cedar-go/x/exp/schema/validate"
)

//go:embed schema.cedarschema
var schemaText string

// model is the schema, ready for use. It never changes.
type model struct {
	schema    *resolved.Schema
	validator *validate.Validator
	actions   map[string]*action
	groups    map[types.EntityUID]cedar.Entity // every action with the groups it is in
}

// action is what the schema says of one action.
type action struct {
	principals, resources []string
	context               map[string]attribute
}

// attribute is one value of a context.
type attribute struct {
	kind     valueKind
	optional bool
}

type valueKind string

// The kinds of values in contexts, as an error says them.
const (
	aString  valueKind = "a string"
	aLong    valueKind = "a whole number"
	aBool    valueKind = "true or false"
	anIP     valueKind = "an IP address"
	aTime    valueKind = "a time such as 2026-12-02T15:04:05Z"
	aStrings valueKind = "a list of strings"
)

// theModel reads the schema once. The schema is part of this program: a
// mistake in it is found by the first test.
var theModel = sync.OnceValue(func() *model {
	m, err := newModel(schemaText)
	if err != nil {
		panic("policy/schema.cedarschema: " + err.Error())
	}
	return m
})

func newModel(text string) (*model, error) {
	var s schema.Schema
	if err := s.UnmarshalCedar([]byte(text)); err != nil {
		return nil, err
	}
	r, err := s.Resolve()
	if err != nil {
		return nil, err
	}
	m := &model{schema: r, validator: validate.New(r), actions: map[string]*action{}, groups: map[types.EntityUID]cedar.Entity{}}
	for uid, a := range r.Actions {
		m.groups[uid] = a.Entity
		if a.AppliesTo == nil {
			continue // a group: nobody does it by that name
		}
		info := &action{context: map[string]attribute{}}
		for _, t := range a.AppliesTo.Principals {
			info.principals = append(info.principals, string(t))
		}
		for _, t := range a.AppliesTo.Resources {
			info.resources = append(info.resources, string(t))
		}
		for name, attr := range a.AppliesTo.Context {
			kind, err := kindOf(attr.Type)
			if err != nil {
				return nil, fmt.Errorf("%s: context %s: %w", uid, name, err)
			}
			info.context[string(name)] = attribute{kind, attr.Optional}
		}
		m.actions[string(uid.ID)] = info
	}
	return m, nil
}

func kindOf(t resolved.IsType) (valueKind, error) {
	switch t := t.(type) {
	case resolved.StringType:
		return aString, nil
	case resolved.LongType:
		return aLong, nil
	case resolved.BoolType:
		return aBool, nil
	case resolved.ExtensionType:
		switch t {
		case "ipaddr":
			return anIP, nil
		case "datetime":
			return aTime, nil
		}
	case resolved.SetType:
		if _, ok := t.Element.(resolved.StringType); ok {
			return aStrings, nil
		}
	}
	return "", fmt.Errorf("a call cannot carry a %T", t)
}

// members returns the actions that the scope of a policy can match: those it
// names and those in the groups that it names. nil means all.
func (m *model) members(named []types.EntityUID) map[string]bool {
	if named == nil {
		return nil
	}
	all := map[string]bool{}
	for id := range m.actions {
		for _, group := range named {
			if m.within(cedar.NewEntityUID("Action", types.String(id)), group) {
				all[id] = true
			}
		}
	}
	return all
}

// within says whether an action is the other one or in it, at any depth.
func (m *model) within(uid, group types.EntityUID) bool {
	if uid == group {
		return true
	}
	for parent := range m.groups[uid].Parents.All() {
		if m.within(parent, group) {
			return true
		}
	}
	return false
}

// actionNames returns all actions that somebody can do, sorted.
func (m *model) actionNames() []string { return slices.Sorted(maps.Keys(m.actions)) }

// entityTypes returns all types of entities, sorted.
func (m *model) entityTypes() []string {
	var names []string
	for t := range m.schema.Entities {
		names = append(names, string(t))
	}
	slices.Sort(names)
	return names
}

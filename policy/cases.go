package policy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"airlock.dev/airlock"
)

// Question is a call with all that it takes to decide it. Files of tests and
// `airlock policy explain` have it.
type Question struct {
	Team    string          `json:"team,omitempty"`    // whose ceiling holds; empty is "default"
	Profile string          `json:"profile,omitempty"` // that the client asked for; empty with no network: the ceiling alone decides
	Network json.RawMessage `json:"network,omitempty"` // that the client asked for, as in a create
	Facts   Facts           `json:"facts,omitzero"`
	Call    Call            `json:"call"`
}

// ParseQuestion reads a question in JSON. It refuses fields that it does not know.
func ParseQuestion(text []byte) (Question, error) {
	var q Question
	if len(text) > maxTests {
		return q, airlock.Invalidf("", fmt.Sprintf("use at most %d", maxTests), "a question of %d bytes", len(text))
	}
	if err := strict(text, &q); err != nil {
		return q, airlock.Invalidf("", "write an object with call {principal, action, resource, context} and, where it needs them, facts, team, profile and network", "the question is not understood: %s", clipped(err.Error()))
	}
	return q, q.complete()
}

// complete adds what goes without saying: who the principal is, and the team.
func (q *Question) complete() error {
	if q.Team == "" {
		q.Team = "default"
	}
	if q.Facts.Team == "" {
		q.Facts.Team = q.Team
	}
	for _, e := range []Entity{q.Call.Principal, q.Call.Resource} {
		switch {
		case e.Type == "Sandbox" && q.Facts.Sandbox.ID == "":
			q.Facts.Sandbox.ID = e.ID
		case (e.Type == "User" || e.Type == "Agent") && q.Facts.Caller.ID == "":
			q.Facts.Caller.ID = e.ID
			if q.Facts.Caller.Kind == "" {
				q.Facts.Caller.Kind = strings.ToLower(e.Type)
			}
			if q.Facts.Caller.Role == "" {
				q.Facts.Caller.Role = string(airlock.Client)
			}
		case e.Type == "App" && q.Facts.App.ID == "":
			q.Facts.App.ID = e.ID
		case e.Type == "Execution" && q.Facts.Execution.ID == "":
			q.Facts.Execution.ID = e.ID
		}
	}
	if q.Facts.Sandbox.ID != "" && q.Facts.Sandbox.Template == "" {
		q.Facts.Sandbox.Template = "base"
	}
	_, err := q.request()
	return err
}

// request returns the policies of what the client asked for, or nil.
func (q *Question) request() (*Set, error) {
	if q.Profile == "" && q.Network == nil {
		return nil, nil
	}
	var n airlock.Network
	if q.Network != nil {
		if err := strict(q.Network, &n); err != nil {
			return nil, airlock.Invalidf("network", "it has allowInternet, allowOut, denyOut and allowPublicTraffic", "network is not understood: %s", clipped(err.Error()))
		}
	}
	return FromRequest(q.Profile, "", n, nil)
}

// Under returns what holds for the question under an operator's policies.
func (q *Question) Under(p *Policies) (Effective, error) {
	request, err := q.request()
	return Effective{Ceiling: p.For(q.Team), Request: request}, err
}

// Test is one line of an operator's intent: a question and the answer.
type Test struct {
	Name   string `json:"test"`
	Expect Effect `json:"expect"`
	Policy string `json:"policy,omitempty"` // id that must be among those that decided; with or without its "ceiling/"
	Question

	File string `json:"-"`
	Line int    `json:"-"` // where the test begins
}

// Result is what came of a test.
type Result struct {
	Test     Test     `json:"-"`
	Name     string   `json:"test"`
	File     string   `json:"file"`
	Line     int      `json:"line"`
	Passed   bool     `json:"passed"`
	Expect   Effect   `json:"expect"`
	Decision Decision `json:"decision"`
	Failure  string   `json:"failure,omitempty"` // one sentence
}

// Run decides the test's call and compares.
func (t Test) Run(p *Policies) Result {
	r := Result{Test: t, Name: t.Name, File: t.File, Line: t.Line, Expect: t.Expect}
	e, err := t.Under(p)
	if err != nil { // ParseTests has read it before
		r.Failure = err.Error()
		return r
	}
	r.Decision = e.Decide(t.Facts, t.Call)
	switch {
	case r.Decision.Effect != t.Expect:
		r.Failure = fmt.Sprintf("expected %s, got %s: %s", t.Expect, r.Decision.Effect, r.Decision.Reason)
	case t.Policy != "" && !slices.ContainsFunc(r.Decision.Policies, func(id string) bool {
		_, bare, _ := strings.Cut(id, "/")
		return id == t.Policy || bare == t.Policy
	}):
		r.Failure = fmt.Sprintf("%s as expected, but not by policy %s: %s", t.Expect, t.Policy, r.Decision.Reason)
	default:
		r.Passed = true
	}
	return r
}

// ParseTests reads a file of tests in YAML: a list of Test. A principal or
// resource is written Type::id; strings need quotes only where YAML needs
// them. The error is Problems.
func ParseTests(file string, text []byte) ([]Test, error) {
	var doc yaml.Node
	d := yaml.NewDecoder(bytes.NewReader(text))
	if err := d.Decode(&doc); err != nil && !errors.Is(err, io.EOF) {
		return nil, Problems{yamlProblem(file, err)}
	}
	if err := d.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return nil, Problems{{File: file, Message: "there is more than one document in it", Hint: "write one list of tests"}}
	}
	if len(doc.Content) != 1 || doc.Content[0].Kind != yaml.SequenceNode {
		return nil, Problems{{File: file, Message: "it is no list of tests", Hint: "write `- test: what must hold`, then call and expect"}}
	}
	var tests []Test
	var problems Problems
	for _, n := range doc.Content[0].Content {
		t, err := parseTest(n)
		if err != nil {
			at := n.Line
			var there *atLine
			if errors.As(err, &there) {
				at = there.line
			}
			var coded *airlock.Error
			hint := "a test has test, call {principal, action, resource, context}, expect, and where it needs them policy, team, profile, network, facts"
			message := err.Error()
			if errors.As(err, &coded) {
				message, hint = coded.Message, coded.Hint
			}
			problems = append(problems, Problem{File: file, Line: at, Message: clipped(message), Hint: hint})
			continue
		}
		t.File, t.Line = file, n.Line
		tests = append(tests, t)
	}
	if len(problems) > 0 {
		return nil, problems
	}
	return tests, nil
}

var yamlLine = regexp.MustCompile(`line (\d+): `)

func yamlProblem(file string, err error) Problem {
	p := Problem{File: file, Message: clipped("this is not YAML: " + strings.TrimPrefix(err.Error(), "yaml: ")), Hint: "check indentation and quotes"}
	if m := yamlLine.FindStringSubmatch(err.Error()); m != nil {
		p.Line, _ = strconv.Atoi(m[1])
		p.Message = strings.Replace(p.Message, m[0], "", 1)
	}
	return p
}

type atLine struct {
	line int
	err  error
}

func (e *atLine) Error() string { return e.err.Error() }
func (e *atLine) Unwrap() error { return e.err }

func parseTest(n *yaml.Node) (Test, error) {
	var t Test
	v, err := plain(n, 0)
	if err != nil {
		return t, err
	}
	m, ok := v.(map[string]any)
	if !ok {
		return t, errors.New("it is no test")
	}
	if call, ok := m["call"].(map[string]any); ok {
		for _, key := range []string{"principal", "resource"} {
			if s, ok := call[key].(string); ok {
				typ, id, found := strings.Cut(s, "::")
				if !found {
					return t, fmt.Errorf("%s %s is not written Type::id, such as Sandbox::i1", key, shown(s))
				}
				if len(id) >= 2 && id[0] == '"' && id[len(id)-1] == '"' {
					id = id[1 : len(id)-1]
				}
				call[key] = map[string]any{"type": typ, "id": id}
			}
		}
	}
	text, err := json.Marshal(m)
	if err != nil {
		return t, err
	}
	if err := strict(text, &t); err != nil {
		return t, err
	}
	switch {
	case t.Name == "":
		return t, errors.New("a test has no name")
	case t.Expect != Permit && t.Expect != Deny && t.Expect != Hold:
		return t, airlock.Invalidf("expect", "write permit, deny or hold", "expect is %s", shown(string(t.Expect)))
	case theModel().actions[t.Call.Action] == nil:
		// Such a call is denied, so that a misspelt test would pass.
		return t, airlock.Invalidf("action", "there are "+strings.Join(theModel().actionNames(), ", "), "there is no action %s", shown(t.Call.Action))
	}
	if err := t.complete(); err != nil {
		return t, err
	}
	if _, err := newQuery(t.Facts, t.Call); err != nil {
		return t, airlock.Invalidf("call", "correct the test: Airlock never asks this, and would deny it", "the call is not one that policies can judge: %s", err)
	}
	return t, nil
}

// plain turns YAML into what JSON has. Times and addresses stay the strings
// that they were written as.
func plain(n *yaml.Node, depth int) (any, error) {
	if depth > 16 {
		return nil, &atLine{n.Line, errors.New("nested too deeply")}
	}
	switch n.Kind {
	case yaml.MappingNode:
		m := map[string]any{}
		for i := 0; i+1 < len(n.Content); i += 2 {
			key := n.Content[i]
			if _, twice := m[key.Value]; twice || key.Kind != yaml.ScalarNode {
				return nil, &atLine{key.Line, fmt.Errorf("%s is there twice or is no name", shown(key.Value))}
			}
			v, err := plain(n.Content[i+1], depth+1)
			if err != nil {
				return nil, err
			}
			m[key.Value] = v
		}
		return m, nil
	case yaml.SequenceNode:
		list := []any{}
		for _, c := range n.Content {
			v, err := plain(c, depth+1)
			if err != nil {
				return nil, err
			}
			list = append(list, v)
		}
		return list, nil
	case yaml.ScalarNode:
		switch n.ShortTag() {
		case "!!int":
			if i, err := strconv.ParseInt(n.Value, 10, 64); err == nil {
				return i, nil
			}
		case "!!bool":
			var b bool
			if err := n.Decode(&b); err == nil {
				return b, nil
			}
		}
		return n.Value, nil
	}
	return nil, &atLine{n.Line, errors.New("anchors and aliases are not read here")}
}

// strict reads one JSON value and refuses fields that v does not have.
func strict(text []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("there is more after it")
	}
	return nil
}

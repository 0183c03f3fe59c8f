package policy

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"iter"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/cedar-policy/cedar-go"
	cedarast "github.com/cedar-policy/cedar-go/ast"
	"github.com/cedar-policy/cedar-go/types"
	"github.com/cedar-policy/cedar-go/x/exp/ast"
	"github.com/cedar-policy/cedar-go/x/exp/eval"

	"airlock.dev/airlock"
)

// The bounds of a policy text. What is beyond is refused.
const (
	maxText        = 256 << 10 // bytes
	maxPolicies    = 1000
	maxDepth       = 64    // brackets in brackets
	maxSigns       = 4096  // of . ! and - in one policy: the parser's work grows with their square
	maxNodes       = 16384 // parts of one policy's conditions
	maxObligations = 64    // of one policy
	maxProblems    = 100   // that are told of one text
	maxAdvice      = 200   // bytes of a @reason
)

// Set is policies that passed the strict validator. It never changes.
type Set struct {
	name     string
	policies []*policy // by id
	byID     map[string]*policy
	byAction map[cedar.String]slice
	text     string
	digest   string
}

// policy is one policy of a set.
type policy struct {
	id          string
	file        string
	line        int
	cedar       *cedar.Policy
	scoped      *cedar.Policy // the same without its action: for a slice, where that is settled
	permits     bool
	actions     map[string]bool // that its scope can match; nil is all
	obligations []Obligation
	reason      string // what a denial says; of the policy's author

	patternBytes int // of all its conditions with like
}

// remedy is what a denial by p says to do.
func (p *policy) remedy(layer string) string {
	if p.reason != "" {
		return p.reason
	}
	if layer == "request" {
		return "make the sandbox without this restriction if you need it"
	}
	return "ask your operator, who can change it"
}

// slice is the policies of a set that can match one action. A decision asks
// only them, in a fixed order.
type slice []*policy

// All makes a slice what Cedar evaluates.
func (s slice) All() iter.Seq2[cedar.PolicyID, *cedar.Policy] {
	return func(yield func(cedar.PolicyID, *cedar.Policy) bool) {
		for _, p := range s {
			if !yield(cedar.PolicyID(p.id), p.scoped) {
				return
			}
		}
	}
}

// Name is what the set was parsed as: a file's name or a profile's.
func (s *Set) Name() string { return s.name }

// Len is the number of policies.
func (s *Set) Len() int { return len(s.policies) }

// IDs are the ids of the policies, sorted.
func (s *Set) IDs() []string {
	ids := make([]string, len(s.policies))
	for i, p := range s.policies {
		ids[i] = p.id
	}
	return ids
}

// Injected are the secrets that permits of the set put in, sorted. A nil set
// has none.
func (s *Set) Injected() []string {
	var names []string
	if s == nil {
		return nil
	}
	for _, p := range s.policies {
		for _, o := range p.obligations {
			if o.Kind == KindInject && !slices.Contains(names, o.Value) {
				names = append(names, o.Value)
			}
		}
	}
	slices.Sort(names)
	return names
}

// Passes says whether a permit of the set leaves TLS undecrypted.
func (s *Set) Passes() bool {
	return s != nil && slices.ContainsFunc(s.policies, func(p *policy) bool {
		return slices.ContainsFunc(p.obligations, func(o Obligation) bool { return o.Kind == KindPass })
	})
}

// Text is the policies in one canonical form, sorted by id and without
// comments. Parse reads it back as the same set.
func (s *Set) Text() string { return s.text }

// Digest is the SHA-256 of Text in lower-case hexadecimal.
func (s *Set) Digest() string { return s.digest }

// Problem is one thing wrong in a file, and what to do about it.
type Problem struct {
	File    string `json:"file"`
	Line    int    `json:"line,omitempty"`   // from 1; 0 is the whole file
	Column  int    `json:"column,omitempty"` // from 1; 0 is the whole line
	Policy  string `json:"policy,omitempty"` // id, if it has one
	Message string `json:"message"`
	Hint    string `json:"hint"`
}

// String is the problem on one line: where, which policy, what, and the remedy.
func (p Problem) String() string {
	var b strings.Builder
	b.WriteString(p.File)
	if p.Line > 0 {
		fmt.Fprintf(&b, ":%d", p.Line)
		if p.Column > 0 {
			fmt.Fprintf(&b, ":%d", p.Column)
		}
	}
	b.WriteString(": ")
	if p.Policy != "" {
		fmt.Fprintf(&b, "policy %s: ", p.Policy)
	}
	b.WriteString(p.Message)
	if p.Hint != "" {
		b.WriteString(": ")
		b.WriteString(p.Hint)
	}
	return b.String()
}

// Problems is the error of Parse and Load: all that is wrong, in the order of
// the files. As a coded error it is the first, with the code Invalid.
type Problems []Problem

// Error returns the problems, one on each line.
func (p Problems) Error() string {
	lines := make([]string, len(p))
	for i, one := range p {
		lines[i] = one.String()
	}
	return strings.Join(lines, "\n")
}

// Unwrap returns the coded error.
func (p Problems) Unwrap() error {
	if len(p) == 0 {
		return nil
	}
	first := p[0]
	first.Hint = ""
	return airlock.Invalidf(p[0].File, p[0].Hint, "%s", first)
}

// Parse reads policies in Cedar's language and holds them against the schema
// with the strict validator. Every policy has an @id of its own. The error is
// Problems, all of them; name is what they call the file.
func Parse(name string, text []byte) (*Set, error) {
	policies, problems := parse(name, text)
	if len(problems) > 0 {
		return nil, problems
	}
	return newSet(name, policies)
}

// newSet makes a set of policies that may come from several files.
func newSet(name string, policies []*policy) (*Set, error) {
	s := &Set{name: name, policies: slices.Clone(policies), byID: map[string]*policy{}, byAction: map[cedar.String]slice{}}
	slices.SortStableFunc(s.policies, func(a, b *policy) int { return strings.Compare(a.id, b.id) })
	var problems Problems
	for _, p := range s.policies {
		if other := s.byID[p.id]; other != nil {
			problems = append(problems, Problem{File: p.file, Line: p.line, Policy: p.id,
				Message: fmt.Sprintf("%s:%d has a policy of the same id", other.file, other.line), Hint: "give each its own @id"})
		}
		s.byID[p.id] = p
	}
	if len(problems) > 0 {
		return nil, problems
	}
	var text strings.Builder
	for i, p := range s.policies {
		if i > 0 {
			text.WriteString("\n")
		}
		text.Write(p.cedar.MarshalCedar())
		text.WriteString("\n")
	}
	s.text = text.String()
	sum := sha256.Sum256([]byte(s.text))
	s.digest = hex.EncodeToString(sum[:])
	for _, id := range theModel().actionNames() {
		var matching slice
		for _, p := range s.policies {
			if p.actions == nil || p.actions[id] {
				matching = append(matching, p)
			}
		}
		s.byAction[cedar.String(id)] = matching
	}
	return s, nil
}

// join makes one set of several.
func join(name string, sets ...*Set) (*Set, error) {
	var all []*policy
	for _, s := range sets {
		all = append(all, s.policies...)
	}
	return newSet(name, all)
}

func parse(name string, text []byte) (policies []*policy, problems Problems) {
	defer func() {
		// Cedar's parser and validator are young. A mistake in them must
		// refuse one text, not end the server.
		if r := recover(); r != nil {
			policies, problems = nil, Problems{{File: name, Message: "cannot be read: " + clipped(fmt.Sprint(r)), Hint: "report this as an error of Airlock"}}
		}
	}()
	if p := readable(name, text); p != nil {
		return nil, Problems{*p}
	}
	list, err := cedar.NewPolicyListFromBytes(name, text)
	if err != nil {
		return nil, Problems{syntaxProblem(name, err)}
	}
	if len(list) == 0 {
		return nil, Problems{{File: name, Message: "there is no policy in it", Hint: `to deny everything write @id("nothing") forbid (principal, action, resource);`}}
	}
	if len(list) > maxPolicies {
		return nil, Problems{{File: name, Message: fmt.Sprintf("%d policies", len(list)), Hint: fmt.Sprintf("use at most %d: every one costs time in every decision", maxPolicies)}}
	}
	seen := map[string]int{}
	for _, one := range list {
		p, found := check(name, text, one)
		if first := seen[p.id]; first > 0 && p.id != "" {
			found = append(found, Problem{File: name, Line: p.line, Column: one.Position().Column, Policy: p.id,
				Message: fmt.Sprintf("line %d has a policy of the same id", first), Hint: "give each its own @id"})
		}
		seen[p.id] = p.line
		policies = append(policies, p)
		problems = append(problems, found...)
		if len(problems) > maxProblems {
			return nil, problems[:maxProblems]
		}
	}
	return policies, problems
}

// readable refuses a text that is too large, that a person would not see as it
// is, or whose nesting would exhaust the stack of the parser.
func readable(name string, text []byte) *Problem {
	if len(text) > maxText {
		return &Problem{File: name, Message: fmt.Sprintf("%d bytes", len(text)), Hint: fmt.Sprintf("use at most %d, in several files", maxText)}
	}
	line, column, depth, signs := 1, 0, 0, 0
	inString, inComment := false, false
	for i := 0; i < len(text); {
		r, size := utf8.DecodeRune(text[i:])
		column++
		if r == utf8.RuneError && size == 1 || unseen(r) {
			return &Problem{File: name, Line: line, Column: column, Message: "a character that does not print", Hint: "remove it; in a string write it as \\u{…}"}
		}
		switch {
		case r == '\n':
			line, column, inComment = line+1, 0, false
		case inComment:
		case inString && r == '\\':
			i += size
			if i < len(text) {
				_, size = utf8.DecodeRune(text[i:])
				column++
			}
		case r == '"':
			inString = !inString
		case inString:
		case r == '/' && i+1 < len(text) && text[i+1] == '/':
			inComment = true
		case r == '(' || r == '[' || r == '{':
			if depth++; depth > maxDepth {
				return &Problem{File: name, Line: line, Column: column, Message: fmt.Sprintf("more than %d brackets in each other", maxDepth), Hint: "write several policies"}
			}
		case r == ')' || r == ']' || r == '}':
			depth--
		case r == '.' || r == '!' || r == '-':
			if signs++; signs > maxSigns {
				return &Problem{File: name, Line: line, Column: column, Message: "a policy that is too long", Hint: "write several policies"}
			}
		case r == ';':
			signs = 0
		}
		i += size
	}
	return nil
}

// unseen says whether a character would not show in an editor as what it is.
// Characters that Go's tables do not know yet may pass: Cedar's may.
func unseen(r rune) bool {
	switch r {
	case ' ', '\n', '\t', '\r':
		return false
	}
	return unicode.In(r, unicode.Cc, unicode.Cf, unicode.Co, unicode.Cs, unicode.Zl, unicode.Zp, unicode.Zs)
}

var position = regexp.MustCompile(`(?:parse error at )?<input>:(\d+):(\d+)(?: ("(?:[^"\\]|\\.)*"))?: `)

func syntaxProblem(name string, err error) Problem {
	text := strings.TrimPrefix(err.Error(), "parser error: ")
	p := Problem{File: name, Hint: "a policy is @id(\"…\") permit or forbid (principal, action, resource) when { … } unless { … };"}
	if m := position.FindStringSubmatchIndex(text); m != nil {
		p.Line, _ = strconv.Atoi(text[m[2]:m[3]])
		p.Column, _ = strconv.Atoi(text[m[4]:m[5]])
		near := ""
		if m[6] >= 0 {
			near = text[m[6]:m[7]]
		}
		text = inWords(text[m[1]:], near)
	}
	p.Message = clipped("this is not Cedar's language: " + text)
	return p
}

var (
	policyID   = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,63}$`)
	columnName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_$]{0,62}(\.[A-Za-z_][A-Za-z0-9_$]{0,62}){1,2}$`)
	secretName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)
)

// check holds one policy against the schema and reads its annotations.
func check(name string, text []byte, c *cedar.Policy) (*policy, Problems) {
	at := c.Position()
	p := &policy{file: name, line: at.Line, cedar: c, permits: c.Effect() == cedar.Permit}
	var problems Problems
	wrong := func(column, line int, hint, format string, args ...any) {
		problems = append(problems, Problem{File: name, Line: line, Column: column, Policy: p.id, Message: clipped(fmt.Sprintf(format, args...)), Hint: hint})
	}
	annotations := c.Annotations()
	p.id = string(annotations["id"])
	if !policyID.MatchString(p.id) {
		given := p.id
		p.id = ""
		if _, ok := annotations["id"]; ok {
			wrong(at.Column, at.Line, "use 1 to 64 of a-z, 0-9, dot, _ and -, not beginning with a sign", "@id(%s) is no id", shown(given))
		} else {
			wrong(at.Column, at.Line, `write @id("what-it-is-for") before it: the audit trail names policies by their ids`, "the policy has no @id")
		}
	}
	for _, key := range slices.Sorted(maps.Keys(annotations)) {
		value := string(annotations[key])
		if key == "id" {
			continue
		}
		if err := p.annotate(string(key), value); err != nil {
			line, column := find(text, at, "@"+string(key))
			wrong(column, line, err.hint, "%s", err.message)
		}
	}
	tree := (*ast.Policy)(c.AST())
	if err := bounds(tree); err != nil {
		wrong(at.Column, at.Line, "write several policies", "%s", err)
		return p, problems
	}
	p.patternBytes = patternBytes(tree)
	scoped := *tree
	scoped.Action = ast.ScopeTypeAll{}
	p.scoped = cedar.NewPolicyFromAST((*cedarast.Policy)(&scoped))
	m := theModel()
	if err := m.validator.Policy("", tree); err != nil {
		for _, e := range flat(err) {
			line, column := at.Line, at.Column
			if word := blamed(e.Error()); word != "" {
				line, column = find(text, at, word)
			}
			wrong(column, line, m.hint(e.Error()), "%s", e)
		}
	}
	switch scope := tree.Action.(type) {
	case ast.ScopeTypeEq:
		p.actions = m.members([]types.EntityUID{scope.Entity})
	case ast.ScopeTypeIn:
		p.actions = m.members([]types.EntityUID{scope.Entity})
	case ast.ScopeTypeInSet:
		p.actions = m.members(append([]types.EntityUID{}, scope.Entities...))
	}
	for _, u := range m.unmet(p) {
		line, column := find(text, at, "@"+string(u.kind))
		wrong(column, line, u.hint, "%s", u.message)
	}
	for _, never := range m.neverMatch(p, tree) {
		line, column := find(text, at, never.literal)
		wrong(column, line, never.hint, "%s matches nothing, ever", shown(never.literal))
	}
	return p, problems
}

// unmatched is a literal of a policy that no call has.
type unmatched struct{ literal, hint string }

// neverMatch returns the literals that calls never have, because Decide sees
// hosts and addresses in one spelling. In a forbid they would be a hole.
func (m *model) neverMatch(p *policy, tree *ast.Policy) []unmatched {
	var all []unmatched
	for _, c := range tree.Conditions {
		ast.Inspect(ast.NewNode(c.Body), func(n ast.IsNode) bool {
			call, ok := n.(ast.NodeTypeExtensionCall)
			if !ok || call.Name != "ip" || len(call.Args) != 1 {
				return true
			}
			if v, ok := call.Args[0].(ast.NodeValue); ok {
				if s, ok := v.Value.(types.String); ok {
					if ip, err := types.ParseIPAddr(string(s)); err == nil && ip.Addr().Is4In6() {
						all = append(all, unmatched{string(s), "write the address as IPv4: that is how calls have it"})
					}
				}
			}
			return true
		})
	}
	for id, a := range m.actions {
		if (p.actions == nil || p.actions[id]) && !slices.Equal(a.resources, []string{"Host"}) {
			return all // resource.name may be of something else
		}
	}
	for _, v := range literalsOf(tree)["resource.name"] {
		if s, ok := v.(string); ok && (s != strings.ToLower(s) || strings.HasSuffix(s, ".")) {
			return append(all, unmatched{s, "write hosts in lower case and without a dot at the end: that is how calls have them"})
		}
	}
	return all
}

// mistake is what is wrong with an annotation.
type mistake struct{ message, hint string }

func (p *policy) annotate(key, value string) *mistake {
	if key == "reason" {
		if value == "" || len(value) > maxAdvice || strings.ContainsFunc(value, func(r rune) bool { return !unicode.IsPrint(r) }) {
			return &mistake{"@reason is empty or long or does not print", fmt.Sprintf("say in 1 to %d bytes what whoever is denied shall do", maxAdvice)}
		}
		p.reason = value
		return nil
	}
	kind := Kind(key)
	switch kind {
	case KindMask, KindInject, KindLimit, KindHold, KindPass:
	default:
		return &mistake{fmt.Sprintf("there is no annotation @%s", clipped(key)), "use @id, @reason, @mask, @inject, @limit, @passthrough and @hold"}
	}
	if !p.permits {
		return &mistake{fmt.Sprintf("a forbid has no @%s", key), "put it on a permit: it says what must be done with a permitted act"}
	}
	if kind == KindLimit {
		n, err := strconv.ParseInt(value, 10, 64)
		if err != nil || n < 1 || n > 1e9 || strconv.FormatInt(n, 10) != value {
			return &mistake{fmt.Sprintf("@limit(%s) is no number of rows", shown(value)), `write @limit("100"), from 1 to 1000000000`}
		}
		p.obligations = append(p.obligations, Obligation{Kind: KindLimit, Limit: n})
		return nil
	}
	if kind == KindPass {
		if value != "" {
			return &mistake{"@passthrough has no value", `write @passthrough("")`}
		}
		p.obligations = append(p.obligations, Obligation{Kind: KindPass})
		return nil
	}
	form := map[Kind]struct {
		valid *regexp.Regexp
		hint  string
	}{
		KindMask:   {columnName, `write @mask("table.column") or @mask("schema.table.column"); several with a comma between`},
		KindInject: {secretName, `write @inject("name-of-the-secret"); several with a comma between`},
		KindHold:   {secretName, `write @hold("who-approves"); several with a comma between`},
	}[kind]
	values := strings.Split(value, ",")
	if len(values) > maxObligations {
		return &mistake{fmt.Sprintf("@%s has %d values", key, len(values)), fmt.Sprintf("use at most %d", maxObligations)}
	}
	for _, v := range values {
		v = strings.TrimSpace(v)
		if !form.valid.MatchString(v) {
			return &mistake{fmt.Sprintf("@%s(%s) is not understood", key, shown(value)), form.hint}
		}
		p.obligations = append(p.obligations, Obligation{Kind: kind, Value: v})
	}
	return nil
}

// bounds refuses a policy that would take long or much stack to evaluate.
func bounds(p *ast.Policy) error {
	nodes := 0
	for _, c := range p.Conditions {
		ast.Inspect(ast.NewNode(c.Body), func(ast.IsNode) bool {
			nodes++
			return nodes <= maxNodes
		})
	}
	if nodes > maxNodes {
		return fmt.Errorf("its conditions have more than %d parts", maxNodes)
	}
	return nil
}

// patternBytes is how long the patterns of a policy are together.
func patternBytes(p *ast.Policy) (n int) {
	for _, c := range p.Conditions {
		ast.Inspect(ast.NewNode(c.Body), func(node ast.IsNode) bool {
			if like, ok := node.(ast.NodeTypeLike); ok {
				n += len(like.Value.MarshalCedar())
			}
			return true
		})
	}
	return n
}

func flat(err error) []error {
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		var all []error
		for _, e := range many.Unwrap() {
			all = append(all, flat(e)...)
		}
		return all
	}
	return []error{err}
}

var backquoted = regexp.MustCompile("`([^`]+)`")

// blamed returns the word of a policy's text that the validator complains of.
func blamed(message string) string {
	m := backquoted.FindStringSubmatch(message)
	if m == nil {
		return ""
	}
	word := m[1]
	if i := strings.LastIndex(word, "::"); i >= 0 {
		word = word[i+2:] // the id of an action, with its quotes
	}
	if i := strings.LastIndexByte(word, '.'); i >= 0 && !strings.HasPrefix(word, `"`) {
		word = word[i+1:] // the attribute of an attribute
	}
	return word
}

// find returns where a word stands in the policy that begins at a position,
// or that position. Cedar tells only where a policy begins.
func find(text []byte, at cedar.Position, word string) (line, column int) {
	rest := string(text[at.Offset:])
	for from := 0; from < len(rest); {
		i := strings.Index(rest[from:], word)
		if i < 0 {
			break
		}
		i += from
		from = i + len(word)
		if partOfWord(rest, i-1) && partOfWord(rest, i) || partOfWord(rest, from) && partOfWord(rest, from-1) {
			continue
		}
		before := rest[:i]
		if end := strings.LastIndexByte(before, '\n'); end >= 0 {
			return at.Line + strings.Count(before, "\n"), utf8.RuneCountInString(before[end+1:]) + 1
		}
		return at.Line, at.Column + utf8.RuneCountInString(before)
	}
	return at.Line, at.Column
}

func partOfWord(s string, i int) bool {
	return i >= 0 && i < len(s) && (s[i] == '_' || s[i] >= '0' && s[i] <= '9' || s[i]|0x20 >= 'a' && s[i]|0x20 <= 'z')
}

var (
	noAttribute = regexp.MustCompile("^attribute `([^`]+)` (?:on entity type `([^`]+)`|in context for Action::\"([^\"]+)\") not found")
	noAction    = regexp.MustCompile("^unrecognized action `Action::\"([^\"]*)\"`")
	optional    = regexp.MustCompile("^unable to guarantee safety of access to (optional attribute|tag)")
)

// hint says what to do about a complaint of the validator.
func (m *model) hint(message string) string {
	if s := noAttribute.FindStringSubmatch(message); s != nil {
		var has []string
		what := "the context of " + s[3]
		if s[2] != "" {
			what = "a " + s[2]
			for name := range m.schema.Entities[types.EntityType(s[2])].Shape {
				has = append(has, string(name))
			}
		} else if a := m.actions[s[3]]; a != nil {
			has = slices.Collect(maps.Keys(a.context))
		}
		slices.Sort(has)
		if len(has) == 0 {
			return what + " has no attributes: name the type of principal or resource in the head of the policy, such as `resource is Sandbox`"
		}
		return what + " has " + strings.Join(has, ", ")
	}
	if s := noAction.FindStringSubmatch(message); s != nil {
		group, _, _ := strings.Cut(s[1], ":")
		var near []string
		for uid := range m.groups {
			if id := string(uid.ID); strings.HasPrefix(id, group+":") {
				near = append(near, id)
			}
		}
		if len(near) == 0 {
			for uid := range m.groups {
				if id := string(uid.ID); strings.HasSuffix(id, ":*") {
					near = append(near, id)
				}
			}
		}
		slices.Sort(near)
		return "there are " + strings.Join(near, ", ")
	}
	switch {
	case optional.MatchString(message):
		return "ask first whether it is there: context has x && context.x …, or hasTag before getTag"
	case strings.HasPrefix(message, "unrecognized entity type"):
		return "there are " + strings.Join(m.entityTypes(), ", ")
	case strings.HasPrefix(message, "unable to find an applicable action"):
		return "no action of the policy has this type of principal and of resource: see the schema"
	case strings.Contains(message, "failed to parse as IP address"):
		return `write ip("192.0.2.7") or ip("192.0.2.0/24")`
	case strings.HasPrefix(message, "unexpected type"), strings.Contains(message, "not compatible"):
		return "compare values of one type: the schema says which each has"
	}
	return "see the schema and docs/POLICY.md"
}

// conditionText returns an expression in Cedar's language.
func conditionText(n ast.IsNode) string {
	p := ast.Permit().When(ast.NewNode(n))
	text := string(cedar.NewPolicyFromAST((*cedarast.Policy)(p)).MarshalCedar())
	_, text, _ = strings.Cut(text, "when { ")
	return strings.TrimSuffix(text, " };")
}

// holds evaluates an expression for a call.
func (q *query) holds(n ast.IsNode) (bool, error) {
	v, err := eval.Eval(n, eval.Env{Entities: q, Principal: q.req.Principal, Action: q.req.Action, Resource: q.req.Resource, Context: q.req.Context})
	if err != nil {
		return false, err
	}
	b, ok := v.(cedar.Boolean)
	if !ok {
		return false, errors.New("it is neither true nor false")
	}
	return bool(b), nil
}

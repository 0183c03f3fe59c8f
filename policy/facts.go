package policy

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/cedar-policy/cedar-go"
	"github.com/cedar-policy/cedar-go/types"
)

// Facts are what is known of those who take part in a call, besides the call.
// They come from Airlock itself, never from the sandbox. What is zero is
// absent: a policy that needs it cannot be evaluated, and denies.
type Facts struct {
	Team      string    `json:"team,omitempty"` // that the call belongs to: owner of the sandbox or the app
	Caller    Caller    `json:"caller,omitzero"`
	Sandbox   Sandbox   `json:"sandbox,omitzero"`
	App       App       `json:"app,omitzero"`
	Execution Execution `json:"execution,omitzero"`
}

// Caller is the API key that acts.
type Caller struct {
	ID   string `json:"id,omitempty"`   // of the key
	Team string `json:"team,omitempty"` // of the key, if it is not the call's
	Role string `json:"role,omitempty"` // client, operator, approver or auditor
	Kind string `json:"kind,omitempty"` // "user", also when empty, or "agent"
}

// Sandbox is the sandbox that acts or is acted on.
type Sandbox struct {
	ID       string            `json:"id,omitempty"`
	Template string            `json:"template,omitempty"`
	Metadata map[string]string `json:"metadata,omitempty"` // its labels
}

// App is promoted code.
type App struct {
	ID      string `json:"id,omitempty"`
	Version string `json:"version,omitempty"` // a digest
}

// Execution is one run of an app.
type Execution struct {
	ID string `json:"id,omitempty"`
}

// The bounds of a call. What is beyond is denied.
const (
	maxID       = 4096 // bytes of an id; a path in a sandbox may have so many
	maxString   = 8192 // bytes of a string in a context
	maxContext  = 32   // values in a context
	maxList     = 256  // strings of a list
	maxMetadata = 128  // labels of a sandbox
)

// query is a call as Cedar takes it: the request, and the few entities that
// it is about. It is cedar.EntityGetter, for one decision.
type query struct {
	model    *model
	facts    *Facts
	req      cedar.Request
	entities []cedar.Entity // the resource and what holds it; of the facts, those that were asked for
}

// Get returns what is known of an entity. Most decisions ask for one or two
// of those that facts describe, so they are made when they are asked for.
func (q *query) Get(uid cedar.EntityUID) (cedar.Entity, bool) {
	if uid.Type == "Action" {
		e, ok := q.model.groups[uid]
		return e, ok
	}
	for i := range q.entities {
		if q.entities[i].UID == uid {
			return q.entities[i], true
		}
	}
	callersTeam := uid.Type == "Team" && uid.ID != "" && string(uid.ID) == q.facts.Caller.Team
	if !callersTeam && mustBeKnown(q.facts, Entity{string(uid.Type), string(uid.ID)}) != nil {
		return cedar.Entity{}, false
	}
	q.describe(uid)
	return q.entities[len(q.entities)-1], true
}

func (q *query) add(uid cedar.EntityUID, attrs cedar.RecordMap, parents ...cedar.EntityUID) {
	q.entities = append(q.entities, cedar.Entity{UID: uid, Parents: cedar.NewEntityUIDSet(parents...), Attributes: cedar.NewRecord(attrs)})
}

func uid(typ, id string) cedar.EntityUID {
	return cedar.EntityUID{Type: cedar.EntityType(typ), ID: cedar.String(id)}
}

// newQuery holds a call against the schema and the facts.
func newQuery(f Facts, c Call) (*query, error) {
	m := theModel()
	a := m.actions[c.Action]
	if a == nil {
		return nil, fmt.Errorf("there is no action %s", shown(c.Action))
	}
	if !slices.Contains(a.principals, c.Principal.Type) {
		return nil, fmt.Errorf("the principal of %s is one of %s, not a %s", c.Action, strings.Join(a.principals, ", "), shown(c.Principal.Type))
	}
	if !slices.Contains(a.resources, c.Resource.Type) {
		return nil, fmt.Errorf("the resource of %s is one of %s, not a %s", c.Action, strings.Join(a.resources, ", "), shown(c.Resource.Type))
	}
	q := &query{model: m, facts: &f, entities: make([]cedar.Entity, 0, 4)}
	if err := f.check(); err != nil {
		return nil, fmt.Errorf("the facts: %w", err)
	}
	var err error
	if err := mustBeKnown(&f, c.Principal); err != nil {
		return nil, fmt.Errorf("the principal: %w", err)
	}
	q.req.Principal = uid(c.Principal.Type, c.Principal.ID)
	q.req.Action = uid("Action", c.Action)
	if q.req.Resource, err = q.addResource(c.Resource); err != nil {
		return nil, fmt.Errorf("the resource: %w", err)
	}
	if q.req.Context, err = contextOf(a, c); err != nil {
		return nil, err
	}
	return q, nil
}

// check refuses facts that could not be written down.
func (f *Facts) check() error {
	for _, s := range [...]string{f.Team, f.Caller.ID, f.Caller.Team, f.Caller.Role, f.Sandbox.ID, f.Sandbox.Template, f.App.ID, f.App.Version, f.Execution.ID} {
		if err := bounded(s, maxID); err != nil {
			return err
		}
	}
	if k := f.Caller.Kind; k != "" && k != "user" && k != "agent" {
		return fmt.Errorf("a caller is of kind user or agent, not %s", shown(k))
	}
	if len(f.Sandbox.Metadata) > maxMetadata {
		return fmt.Errorf("a sandbox has at most %d labels", maxMetadata)
	}
	for k, v := range f.Sandbox.Metadata {
		if bounded(k, maxString) != nil || bounded(v, maxString) != nil {
			return fmt.Errorf("a label is not UTF-8 or has more than %d bytes", maxString)
		}
	}
	return nil
}

// describe makes an entity that the facts tell of. Its parents are all that it
// is in, at any depth.
func (q *query) describe(e cedar.EntityUID) {
	f := q.facts
	attrs := make(cedar.RecordMap, 4)
	in := make([]cedar.EntityUID, 0, 3)
	team := f.Team
	if (e.Type == "User" || e.Type == "Agent") && f.Caller.Team != "" {
		team = f.Caller.Team
	}
	if e.Type != "Team" && team != "" {
		attrs["team"] = uid("Team", team)
		in = append(in, uid("Team", team))
	}
	text := func(name cedar.String, value string) {
		if value != "" {
			attrs[name] = cedar.String(value)
		}
	}
	within := func(name cedar.String, typ, id string) {
		if id != "" {
			attrs[name] = uid(typ, id)
			in = append(in, uid(typ, id))
		}
	}
	switch e.Type {
	case "User", "Agent":
		text("role", f.Caller.Role)
	case "App":
		text("version", f.App.Version)
	case "Execution":
		within("app", "App", f.App.ID)
	case "Sandbox":
		text("template", f.Sandbox.Template)
		within("app", "App", f.App.ID)
		within("execution", "Execution", f.Execution.ID)
	}
	q.add(e, attrs, in...)
	if e.Type == "Sandbox" && len(f.Sandbox.Metadata) > 0 {
		tags := make(cedar.RecordMap, len(f.Sandbox.Metadata))
		for k, v := range f.Sandbox.Metadata {
			tags[cedar.String(k)] = cedar.String(v)
		}
		q.entities[len(q.entities)-1].Tags = cedar.NewRecord(tags)
	}
}

// Entity returns the caller as the principal of a call.
func (c Caller) Entity() Entity {
	if c.Kind == "agent" {
		return Entity{"Agent", c.ID}
	}
	return Entity{"User", c.ID}
}

// mustBeKnown refuses an entity of the kinds that facts describe when they
// describe another one, or none.
func mustBeKnown(f *Facts, e Entity) error {
	var known string
	switch e.Type {
	case "Team":
		known = f.Team
	case "User", "Agent":
		if f.Caller.Entity().Type == e.Type {
			known = f.Caller.ID
		}
	case "Sandbox":
		known = f.Sandbox.ID
	case "App":
		known = f.App.ID
	case "Execution":
		known = f.Execution.ID
	default:
		return fmt.Errorf("%s is none that facts describe", shown(e.Type))
	}
	if e.ID == "" || e.ID != known {
		return fmt.Errorf("the facts do not describe %s", e)
	}
	return nil
}

// addResource makes the entity that is acted on. Its attributes come from its
// id, so that a caller cannot name one thing and describe another.
func (q *query) addResource(e Entity) (cedar.EntityUID, error) {
	if err := bounded(e.ID, maxID); err != nil {
		return cedar.EntityUID{}, err
	}
	id := uid(e.Type, e.ID)
	switch e.Type {
	case "Host":
		name, err := HostName(e.ID)
		if err != nil {
			return id, err
		}
		id = uid("Host", name)
		q.add(id, cedar.RecordMap{"name": cedar.String(name)})
	case "Port", "Path":
		f := q.facts
		if f.Sandbox.ID == "" {
			return id, errors.New("the facts name no sandbox that it is in")
		}
		sandbox := uid("Sandbox", f.Sandbox.ID)
		m := cedar.RecordMap{"sandbox": sandbox}
		if f.Team != "" {
			m["team"] = uid("Team", f.Team)
		}
		if e.Type == "Port" {
			n, err := strconv.ParseUint(e.ID, 10, 16)
			if err != nil || n == 0 || strconv.FormatUint(n, 10) != e.ID {
				return id, fmt.Errorf("%s is no port: give a number from 1 to 65535", shown(e.ID))
			}
			m["number"] = cedar.Long(n)
		} else {
			if !path.IsAbs(e.ID) || path.Clean(e.ID) != e.ID {
				return id, fmt.Errorf("%s is no absolute path, or has . or .. in it", shown(e.ID))
			}
			m["path"] = cedar.String(e.ID)
		}
		q.add(id, m, sandbox)
	case "Secret":
		if e.ID == "" {
			return id, errors.New("a secret has a name")
		}
		q.add(id, cedar.RecordMap{"name": cedar.String(e.ID)})
	case "Database", "Table", "Column", "RecordSet", "Routine":
		return id, q.addData(id, e)
	default:
		return id, mustBeKnown(q.facts, e)
	}
	return id, nil
}

// dataNames are the parts of the ids of what a database holds.
var dataNames = map[string][]cedar.String{
	"Database":  {"name"},
	"Table":     {"database", "schema", "name"},
	"Column":    {"database", "schema", "table", "name"},
	"RecordSet": {"database", "schema", "table", "name"},
	"Routine":   {"database", "schema", "name"},
}

func (q *query) addData(id cedar.EntityUID, e Entity) error {
	names, parts := dataNames[e.Type], strings.Split(e.ID, "/")
	if len(parts) != len(names) || slices.Contains(parts, "") {
		form := make([]string, len(names))
		for i, n := range names {
			form[i] = strings.ToUpper(string(n))
		}
		return fmt.Errorf("%s is no id of a %s: it is %s", shown(e.ID), e.Type, strings.Join(form, "/"))
	}
	m := make(cedar.RecordMap, len(names))
	for i, n := range names {
		m[n] = cedar.String(parts[i])
	}
	if e.Type == "Database" {
		q.add(id, m)
		return nil
	}
	database := uid("Database", parts[0])
	q.add(database, cedar.RecordMap{"name": cedar.String(parts[0])})
	if len(parts) == 3 {
		q.add(id, m, database)
		return nil
	}
	table := uid("Table", strings.Join(parts[:3], "/"))
	q.add(table, cedar.RecordMap{"database": m["database"], "schema": m["schema"], "name": m["table"]}, database)
	q.add(id, m, table)
	return nil
}

var (
	hostLabels = regexp.MustCompile(`^[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*$`)
	numberLike = regexp.MustCompile(`(^|\.)(0x[0-9a-f]*|[0-9]+)$`)
)

// HostName returns the one spelling of a host's name or address that policies
// see: lower case, without the dot at the end; an IPv4 address in an IPv6 one
// as IPv4. International names come in their ASCII form.
func HostName(s string) (string, error) {
	if addr, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(s, "["), "]")); err == nil && addr.Zone() == "" {
		return addr.Unmap().String(), nil
	}
	name := strings.ToLower(strings.TrimSuffix(s, "."))
	if len(name) > 253 || !hostLabels.MatchString(name) {
		return "", fmt.Errorf("%s is no name or address of a host", shown(s))
	}
	// 0x7f.1 and 2130706433 are addresses to some programs and names to
	// others: what is read in two ways is refused.
	if numberLike.MatchString(name) {
		return "", fmt.Errorf("%s looks like an address and is not written as one: use four decimal numbers", shown(s))
	}
	return name, nil
}

// contextOf turns the circumstances of a call into Cedar's values. All that
// the schema requires must be there, save the time: without it a policy that
// needs it cannot be evaluated.
func contextOf(a *action, c Call) (cedar.Record, error) {
	if len(c.Context) > maxContext {
		return cedar.Record{}, fmt.Errorf("a context has at most %d values", maxContext)
	}
	m := make(cedar.RecordMap, len(c.Context))
	var first string // of the names at fault: maps have no order, decisions do
	var fault error
	blame := func(key string, err error) {
		if fault == nil || key < first {
			first, fault = key, err
		}
	}
	for key, v := range c.Context {
		attr, known := a.context[key]
		if !known {
			blame(key, fmt.Errorf("context of %s: there is no %s, only %s", c.Action, shown(key), strings.Join(slices.Sorted(maps.Keys(a.context)), ", ")))
			continue
		}
		value, err := valueOf(attr.kind, v)
		if err != nil {
			blame(key, fmt.Errorf("context %s of %s: %w", key, c.Action, err))
			continue
		}
		m[cedar.String(key)] = value
	}
	for key, attr := range a.context {
		if _, ok := c.Context[key]; !ok && !attr.optional && key != "time" {
			blame(key, fmt.Errorf("context of %s: %s is missing", c.Action, key))
		}
	}
	if fault != nil {
		return cedar.Record{}, fault
	}
	if p, ok := m["path"].(cedar.String); ok {
		if err := decodedPath(string(p)); err != nil {
			return cedar.Record{}, fmt.Errorf("context path of %s: %w", c.Action, err)
		}
	}
	return cedar.NewRecord(m), nil
}

// decodedPath refuses the path of a request that a server could read as another one.
func decodedPath(p string) error {
	if p == "*" { // of OPTIONS
		return nil
	}
	if !strings.HasPrefix(p, "/") {
		return errors.New("a path begins with /")
	}
	for part := range strings.SplitSeq(p, "/") {
		if part == "." || part == ".." {
			return errors.New("a path has no . and .. in it")
		}
	}
	return nil
}

func valueOf(kind valueKind, v any) (types.Value, error) {
	odd := wrongKind(kind)
	switch kind {
	case aBool:
		if b, ok := v.(bool); ok {
			return cedar.Boolean(b), nil
		}
	case aLong:
		if n, ok := wholeNumber(v); ok {
			return cedar.Long(n), nil
		}
	case aStrings:
		list, err := stringsOf(v)
		if err != nil {
			return nil, err
		}
		values := make([]cedar.Value, len(list))
		for i, s := range list {
			values[i] = cedar.String(s)
		}
		return cedar.NewSet(values...), nil
	default:
		s, ok := v.(string)
		if !ok {
			return nil, odd
		}
		if err := bounded(s, maxString); err != nil {
			return nil, err
		}
		switch kind {
		case aString:
			return cedar.String(s), nil
		case anIP:
			// An address with a zone, and an IPv4 address that hides in an
			// IPv6 one, would not be in the ranges that policies name.
			addr, err := netip.ParseAddr(s)
			if err != nil || addr.Zone() != "" {
				return nil, odd
			}
			addr = addr.Unmap()
			return cedar.IPAddr(netip.PrefixFrom(addr, addr.BitLen())), nil
		case aTime:
			t, err := time.Parse(time.RFC3339Nano, s)
			if err != nil {
				return nil, odd
			}
			return cedar.NewDatetime(t), nil
		}
	}
	return nil, odd
}

// wrongKind is the error of a value that is not of its kind.
type wrongKind valueKind

func (k wrongKind) Error() string { return "give " + string(k) }

func wholeNumber(v any) (int64, bool) {
	switch n := v.(type) {
	case int64:
		return n, true
	case int:
		return int64(n), true
	case int32:
		return int64(n), true
	case uint16:
		return int64(n), true
	case uint32:
		return int64(n), true
	case uint64:
		return int64(n), n <= math.MaxInt64
	case float64: // as encoding/json has it, exact up to 2^53
		return int64(n), n == math.Trunc(n) && math.Abs(n) <= 1<<53
	}
	return 0, false
}

func stringsOf(v any) ([]string, error) {
	var list []string
	switch l := v.(type) {
	case []string:
		list = l
	case []any:
		for _, e := range l {
			s, ok := e.(string)
			if !ok {
				return nil, wrongKind(aStrings)
			}
			list = append(list, s)
		}
	default:
		return nil, wrongKind(aStrings)
	}
	if len(list) > maxList {
		return nil, fmt.Errorf("a list has at most %d strings", maxList)
	}
	for _, s := range list {
		if err := bounded(s, maxString); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// bounded refuses what the audit trail could not write down as it is.
func bounded(s string, most int) error {
	if len(s) > most {
		return fmt.Errorf("a text has %d bytes: at most %d", len(s), most)
	}
	if !utf8.ValidString(s) {
		return fmt.Errorf("%s is not UTF-8", shown(s))
	}
	return nil
}

package api

import (
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/audit/index"
	"airlock.dev/airlock/audit/tiles"
	"airlock.dev/airlock/control"
)

// Trail is what the api asks of the audit log.
type Trail interface {
	Append(ctx context.Context, e audit.Event) (audit.Receipt, error)
	Queue(ctx context.Context, e audit.Event) (uint64, error)
	Owe(ctx context.Context, e audit.Event)
	Find(ctx context.Context, q index.Query, p index.Page) (audit.Page, error)
	Event(ctx context.Context, seq uint64) (json.RawMessage, error)
	Details(ctx context.Context, event []byte) ([]audit.Detail, error)
	Subject(ctx context.Context, subject string) (string, error)
	CatchUp(ctx context.Context) error
	Follow(ctx context.Context, q index.Query, from uint64, fn func(json.RawMessage) error) error
	Prove(ctx context.Context, seq uint64) (tiles.Proof, error)
	Consistency(ctx context.Context, shard string, from, to uint64) (tiles.Consistency, error)
	Shards() []tiles.Shard
	Status() audit.Status
	Rotate(ctx context.Context, by audit.Actor) error
	Drop(ctx context.Context, by audit.Actor, shard string) error
	Erase(ctx context.Context, by audit.Actor, subject string) (string, error)
	Holds(ctx context.Context) ([]audit.Hold, error)
	SetHold(ctx context.Context, by audit.Actor, h audit.Hold) (audit.Hold, error)
	ReleaseHold(ctx context.Context, by audit.Actor, name string) error
}

// auditor is the gate of those who read the trail: auditors that of their
// team, operators all of it.
func auditor(s *server, r *request) error {
	err := s.authenticate(r, airlock.Auditor)
	if err != nil && airlock.CodeOf(err) == airlock.Denied && s.authenticate(r, airlock.Operator) == nil {
		return nil
	}
	return err
}

// actorOf is who asks, as the trail has it.
func actorOf(p airlock.Principal) audit.Actor {
	kind := "user"
	if p.Role == airlock.Operator {
		kind = "operator"
	}
	return audit.Actor{Kind: kind, ID: p.KeyID, Role: p.Role}
}

// asked is an act of an operator or auditor, which the gate has let pass.
func asked(r *request, action, kind, id string) audit.Call {
	return audit.Call{Principal: audit.Entity{Type: "User", ID: r.caller.KeyID}, Action: action, Resource: audit.Entity{Type: kind, ID: id}}
}

// mine narrows a query to what the caller may see.
func mine(p airlock.Principal, q index.Query) index.Query {
	if p.Role != airlock.Operator {
		q.Match = append(q.Match, index.Match{Field: "team", Any: []string{p.Team}})
	}
	return q
}

func (s *server) auditQuery(r *request) (index.Query, error) {
	q, err := index.ParseQuery(r.URL.Query().Get("query"), time.Now())
	if err != nil {
		return index.Query{}, err
	}
	for _, m := range q.Match {
		if m.Field != "subject" {
			continue
		}
		for i, v := range m.Any {
			if m.Any[i], err = s.pseudonym(r, v); err != nil {
				return index.Query{}, err
			}
		}
	}
	return mine(r.caller, q), nil
}

var pseudonymForm = regexp.MustCompile(`^(?:[0-9a-f]{32})?$`)

// pseudonym translates a subject as a person knows it. The log has pseudonyms
// only, so a name that has none would find nothing, whatever there is.
func (s *server) pseudonym(r *request, subject string) (string, error) {
	if pseudonymForm.MatchString(subject) {
		return subject, nil
	}
	if !strings.Contains(subject, ":") {
		return "", airlock.Invalidf("query", "give KIND:ID, such as team:acme, or the 32 hex digits that `airlock audit show` has", "%.80q is no subject", subject)
	}
	unknown := airlock.Invalidf("query", "subjects are team:NAME of teams whose sandboxes ran something; what was erased is found by its pseudonym, which the event subject.erased has",
		"nothing is sealed for the subject %.80q, or its key was erased", subject)
	if r.caller.Role != airlock.Operator && subject != "team:"+r.caller.Team {
		return "", unknown // whether others exist is not theirs to know
	}
	found, err := s.Trail.Subject(r.Context(), subject)
	if airlock.CodeOf(err) == airlock.NotFound {
		return "", unknown
	}
	return found, err
}

// only refuses parameters that nothing reads: a misspelt one would find too much.
func only(query url.Values, names ...string) error {
	for _, name := range slices.Sorted(maps.Keys(query)) {
		if !slices.Contains(names, name) {
			return airlock.Invalidf(name, "use "+strings.Join(names, ", "), "there is no parameter %.40q", name)
		}
	}
	return nil
}

func number(query url.Values, name string) (*uint64, error) {
	text := query.Get(name)
	if text == "" {
		return nil, nil
	}
	n, err := strconv.ParseUint(text, 10, 63)
	if err != nil {
		return nil, airlock.Invalidf(name, "give the number of an event", "%s is %.40q", name, text)
	}
	return &n, nil
}

// catchUpMost is how long a query waits for events that came just before.
const catchUpMost = 5 * time.Second

// catchUp lets who did something find it, unless the index is far behind.
func (s *server) catchUp(r *request) {
	ctx, cancel := context.WithTimeout(r.Context(), catchUpMost)
	defer cancel()
	s.Trail.CatchUp(ctx)
}

func (s *server) auditEvents(w http.ResponseWriter, r *request) error {
	query := r.URL.Query()
	if err := only(query, "query", "order", "limit", "nextToken", "details"); err != nil {
		return err
	}
	q, err := s.auditQuery(r)
	if err != nil {
		return err
	}
	page := index.Page{Newest: query.Get("order") == "newest"}
	if order := query.Get("order"); order != "" && order != "newest" && order != "oldest" {
		return airlock.Invalidf("order", "use newest or oldest, which goes without saying", "order is %.40q", order)
	}
	if details := query.Get("details"); details != "" && details != "true" && details != "false" {
		return airlock.Invalidf("details", "use true or false", "details is %.40q", details)
	}
	if page.Limit, err = limitOf(query, audit.MaxPage); err != nil {
		return err
	}
	if page.After, err = number(query, "nextToken"); err != nil {
		return err
	}
	s.catchUp(r)
	found, err := s.Trail.Find(r.Context(), q, page)
	if err != nil {
		return err
	}
	if found.More {
		w.Header().Set("X-Next-Token", strconv.FormatUint(found.Next, 10))
	}
	reply := map[string]any{"events": found.Events, "behind": found.Behind}
	if query.Get("details") == "true" {
		if r.caller.Role != airlock.Operator {
			return airlock.Errorf(airlock.Denied, "the details of many events at once are for operators: ask for those of one event")
		}
		// To read what is personal is an act of its own.
		if _, err := s.Trail.Append(r.Context(), audit.Event{Type: "audit.details", Actor: actorOf(r.caller), Call: asked(r, "audit:details", "Query", query.Get("query"))}); err != nil {
			return err
		}
		details := make([][]audit.Detail, len(found.Events))
		for i, e := range found.Events {
			if details[i], err = s.Trail.Details(r.Context(), e); err != nil {
				return err
			}
		}
		reply["details"] = details
	}
	writeJSON(w, http.StatusOK, reply)
	return nil
}

// event returns an event that the caller may see. Another team's is absent.
func (s *server) event(r *request) (json.RawMessage, uint64, error) {
	seq, err := strconv.ParseUint(r.PathValue("seq"), 10, 63)
	if err != nil {
		return nil, 0, airlock.Invalidf("seq", "give the number of an event", "%.40q is no number of an event", r.PathValue("seq"))
	}
	if seq >= s.Trail.Status().Indexed {
		s.catchUp(r)
	}
	event, err := s.Trail.Event(r.Context(), seq)
	if err != nil {
		return nil, 0, err
	}
	row, err := index.RowOf(event)
	if err != nil {
		return nil, 0, err
	}
	if r.caller.Role != airlock.Operator && row.Team != r.caller.Team {
		return nil, 0, airlock.Errorf(airlock.NotFound, "there is no event %d of your team", seq)
	}
	return event, seq, nil
}

func (s *server) auditEvent(w http.ResponseWriter, r *request) error {
	event, seq, err := s.event(r)
	if err != nil {
		return err
	}
	reply := map[string]any{"event": event}
	if r.URL.Query().Get("details") == "true" {
		// To read what is personal is an act of its own.
		e := audit.Event{Type: "audit.details", Team: r.caller.Team, Actor: actorOf(r.caller), Call: asked(r, "audit:details", "Event", r.PathValue("seq"))}
		if seq > 0 { // no event is of the one that opens the log
			e.Of = &seq
		}
		if _, err := s.Trail.Append(r.Context(), e); err != nil {
			return err
		}
		if reply["details"], err = s.Trail.Details(r.Context(), event); err != nil {
			return err
		}
	}
	writeJSON(w, http.StatusOK, reply)
	return nil
}

// followWrite is how long a client may take to read one event.
const followWrite = 30 * time.Second

// followAllowed is how long a caller is believed to be allowed to follow.
const followAllowed = 2 * time.Second

func (s *server) auditFollow(w http.ResponseWriter, r *request) error {
	if err := only(r.URL.Query(), "query", "from"); err != nil {
		return err
	}
	q, err := s.auditQuery(r)
	if err != nil {
		return err
	}
	from := s.Trail.Status().Indexed
	if n, err := number(r.URL.Query(), "from"); err != nil {
		return err
	} else if n != nil {
		from = *n
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusOK)
	out := http.NewResponseController(w)
	out.Flush()
	allowed := time.Now()
	s.Trail.Follow(r.Context(), q, from, func(event json.RawMessage) error {
		if time.Since(allowed) > followAllowed { // a key may be revoked meanwhile
			if err := s.again(r); err != nil {
				return err
			}
			allowed = time.Now()
		}
		out.SetWriteDeadline(time.Now().Add(followWrite))
		if _, err := w.Write(append(event[:len(event):len(event)], '\n')); err != nil {
			return err
		}
		return out.Flush()
	})
	return nil // it ends with the client
}

func (s *server) auditStatus(w http.ResponseWriter, _ *request) error {
	writeJSON(w, http.StatusOK, s.Trail.Status())
	return nil
}

// shardBody is a part of the log, and its head.
type shardBody struct {
	ID         string `json:"id"`
	VKey       string `json:"vkey,omitempty"`
	First      uint64 `json:"first"`
	Size       uint64 `json:"size"`
	Checkpoint string `json:"checkpoint"`
	Closed     bool   `json:"closed"`
	Dropped    bool   `json:"dropped"`
}

func (s *server) auditShards(w http.ResponseWriter, _ *request) error {
	all := []shardBody{}
	for _, sh := range s.Trail.Shards() {
		all = append(all, shardBody{sh.ID, sh.VKey, sh.First, sh.Size, sh.Checkpoint, sh.Closed, sh.Dropped})
	}
	writeJSON(w, http.StatusOK, all)
	return nil
}

func (s *server) auditProof(w http.ResponseWriter, r *request) error {
	_, seq, err := s.event(r)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(r.Context(), followWrite)
	defer cancel()
	proof, err := s.Trail.Prove(ctx, seq)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, proof)
	return nil
}

func (s *server) auditConsistency(w http.ResponseWriter, r *request) error {
	query := r.URL.Query()
	from, err := number(query, "from")
	if err != nil {
		return err
	}
	to, err := number(query, "to")
	if err != nil {
		return err
	}
	if from == nil || to == nil {
		return airlock.Invalidf("from", "give from and to, sizes of the shard", "from or to is missing")
	}
	proof, err := s.Trail.Consistency(r.Context(), query.Get("shard"), *from, *to)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, proof)
	return nil
}

func (s *server) auditRotate(w http.ResponseWriter, r *request) error {
	if err := s.Trail.Rotate(r.Context(), actorOf(r.caller)); err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, map[string]string{"shard": s.Trail.Status().Shard})
	return nil
}

func (s *server) auditDrop(w http.ResponseWriter, r *request) error {
	if err := s.Trail.Drop(r.Context(), actorOf(r.caller), r.PathValue("shard")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *server) auditErase(w http.ResponseWriter, r *request) error {
	var body struct {
		Subject string `json:"subject"`
	}
	if err := readJSON(w, r, &body); err != nil {
		return err
	}
	if !strings.Contains(body.Subject, ":") {
		return airlock.Invalidf("subject", "give KIND:ID, such as team:acme", "%.80q is no subject", body.Subject)
	}
	pseudonym, err := s.Trail.Erase(r.Context(), actorOf(r.caller), body.Subject)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, map[string]string{"erased": pseudonym})
	return nil
}

func (s *server) auditHolds(w http.ResponseWriter, r *request) error {
	holds, err := s.Trail.Holds(r.Context())
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, holds)
	return nil
}

func (s *server) auditHold(w http.ResponseWriter, r *request) error {
	var h audit.Hold
	if err := readJSON(w, r, &h); err != nil {
		return err
	}
	h, err := s.Trail.SetHold(r.Context(), actorOf(r.caller), h)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusCreated, h)
	return nil
}

func (s *server) auditRelease(w http.ResponseWriter, r *request) error {
	if err := s.Trail.ReleaseHold(r.Context(), actorOf(r.caller), r.PathValue("name")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// Policies is what the api asks of the policies in force.
type Policies interface {
	Reload(ctx context.Context, by audit.Actor) error
	InForce() control.InForce
}

func (s *server) policiesInForce(w http.ResponseWriter, r *request) error {
	p := s.Policies.InForce()
	ceiling := p.For(r.URL.Query().Get("team"))
	writeJSON(w, http.StatusOK, map[string]any{
		"team": r.URL.Query().Get("team"), "name": ceiling.Name(), "digest": ceiling.Digest(), "text": ceiling.Text(), "teams": p.Teams(),
		"source": p.Source, "loaded": p.Digest(), "files": p.PolicyFiles(), "ceilings": p.Ceilings(),
	})
	return nil
}

func (s *server) reloadPolicies(w http.ResponseWriter, r *request) error {
	if err := s.Policies.Reload(r.Context(), actorOf(r.caller)); err != nil {
		return err
	}
	return s.policiesInForce(w, r)
}

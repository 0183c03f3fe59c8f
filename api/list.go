package api

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/control"
)

const maxPage = 100

// limitOf returns the limit that a query asks for, from 1 to most.
func limitOf(query url.Values, most int) (int, error) {
	text := query.Get("limit")
	if text == "" {
		return most, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > most {
		return 0, airlock.Invalidf("limit", fmt.Sprintf("give a number from 1 to %d", most), "limit is %.20q", text)
	}
	return n, nil
}

// listValues accepts both forms of an array: repeated and joined by commas.
func listValues(query url.Values, name string) []string {
	var all []string
	for _, v := range query[name] {
		for one := range strings.SplitSeq(v, ",") {
			if one != "" {
				all = append(all, one)
			}
		}
	}
	return all
}

// parseMetadata reads the metadata filter. E2B's SDKs escape each key and
// value, then the pairs, then the query: the first was undone with the query.
func parseMetadata(filter string) (map[string]string, error) {
	bad := airlock.Invalidf("metadata", "give key=value pairs joined by &, URL-encoded", "the metadata filter is not readable")
	pairs := map[string]string{}
	if filter == "" {
		return pairs, nil
	}
	text, err := url.QueryUnescape(filter)
	if err != nil {
		return nil, bad
	}
	for pair := range strings.SplitSeq(text, "&") {
		k, v, found := strings.Cut(pair, "=")
		key, kerr := url.QueryUnescape(k)
		value, verr := url.QueryUnescape(v)
		if !found || kerr != nil || verr != nil || key == "" {
			return nil, bad
		}
		pairs[key] = value
	}
	return pairs, nil
}

func matches(sb airlock.Sandbox, pairs map[string]string) bool {
	for k, v := range pairs {
		if got, found := sb.Metadata[k]; !found || got != v {
			return false
		}
	}
	return true
}

func (s *server) listV1(w http.ResponseWriter, r *request) error {
	all, _, err := s.filtered(r, r.URL.Query())
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, bodies(all))
	return nil
}

// filtered returns what matches the query, newest first, and how many of it run.
func (s *server) filtered(r *request, query url.Values) ([]airlock.Sandbox, int, error) {
	pairs, err := parseMetadata(query.Get("metadata"))
	if err != nil {
		return nil, 0, err
	}
	template := query.Get("template")
	if strings.Contains(template, ":") {
		return nil, 0, airlock.Invalidf("template", "name it without a tag", "template is %.60q", template)
	}
	var since time.Time
	if text := query.Get("startedAfter"); text != "" {
		if since, err = time.Parse(time.RFC3339, text); err != nil {
			return nil, 0, airlock.Invalidf("startedAfter", "give a time such as 2026-01-02T15:04:05Z", "startedAfter is %.40q", text)
		}
	}
	wanted := true
	if states := listValues(query, "state"); len(states) > 0 {
		for _, state := range states {
			if state != "running" && state != "paused" {
				return nil, 0, airlock.Invalidf("state", "use running and paused", "state is %.20q", state)
			}
		}
		wanted = slices.Contains(states, "running") // nothing is ever paused
	}
	all, err := s.Sandboxes.List(r.Context(), r.caller)
	if err != nil {
		return nil, 0, err
	}
	all = slices.DeleteFunc(all, func(sb airlock.Sandbox) bool {
		return !matches(sb, pairs) || (template != "" && sb.TemplateID != template) || sb.StartedAt.Before(since)
	})
	slices.SortFunc(all, func(a, b airlock.Sandbox) int { return placeOf(b).compare(placeOf(a)) })
	if !wanted {
		return nil, len(all), nil
	}
	return all, len(all), nil
}

func bodies(all []airlock.Sandbox) []listedBody {
	out := make([]listedBody, len(all))
	for i, sb := range all {
		out[i] = listed(sb)
	}
	return out
}

// place is where a sandbox stands in the list; a page token is the place of
// the page's last. It stays right when others come and go.
type place struct {
	started int64 // Unix nanoseconds
	id      string
}

func placeOf(sb airlock.Sandbox) place { return place{sb.StartedAt.UnixNano(), sb.ID} }

func (p place) compare(q place) int {
	switch {
	case p.started < q.started:
		return -1
	case p.started > q.started:
		return 1
	}
	return strings.Compare(p.id, q.id)
}

func (p place) token() string {
	return base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, "%d %s", p.started, p.id))
}

func parseToken(token string) (place, error) {
	text, err := base64.RawURLEncoding.DecodeString(token)
	started, id, found := strings.Cut(string(text), " ")
	n, nerr := strconv.ParseInt(started, 10, 64)
	if err != nil || nerr != nil || !found || !airlock.ValidSandboxID(id) {
		return place{}, airlock.Invalidf("nextToken", "give the X-Next-Token of the page before", "nextToken is not one of ours")
	}
	return place{n, id}, nil
}

func (s *server) listV2(w http.ResponseWriter, r *request) error {
	query := r.URL.Query()
	limit, err := limitOf(query, maxPage)
	if err != nil {
		return err
	}
	ascending := false
	switch order := query.Get("order"); order {
	case "", "desc":
	case "asc":
		ascending = true
	default:
		return airlock.Invalidf("order", "use asc or desc", "order is %.20q", order)
	}
	all, running, err := s.filtered(r, query)
	if err != nil {
		return err
	}
	if ascending {
		slices.Reverse(all)
	}
	if token := query.Get("nextToken"); token != "" {
		last, err := parseToken(token)
		if err != nil {
			return err
		}
		next := slices.IndexFunc(all, func(sb airlock.Sandbox) bool {
			n := placeOf(sb).compare(last)
			return ascending && n > 0 || !ascending && n < 0
		})
		if next < 0 {
			next = len(all)
		}
		all = all[next:]
	}
	w.Header().Set("X-Total-Running", strconv.Itoa(running))
	if len(all) > limit {
		all = all[:limit]
		w.Header().Set("X-Next-Token", placeOf(all[limit-1]).token())
	}
	writeJSON(w, http.StatusOK, bodies(all))
	return nil
}

// logEntry is one event of a sandbox.
type logEntry struct {
	Timestamp time.Time         `json:"timestamp"`
	Level     string            `json:"level"`
	Message   string            `json:"message"`
	Fields    map[string]string `json:"fields"`
}

func entries(events []control.Event) []logEntry {
	out := make([]logEntry, len(events))
	for i, e := range events {
		if e.Fields == nil {
			e.Fields = map[string]string{}
		}
		out[i] = logEntry{e.Time, e.Level, e.Message, e.Fields}
	}
	return out
}

const maxLogs = 1000

// cursorOf reads a time in milliseconds.
func cursorOf(query url.Values, name string) (time.Time, error) {
	text := query.Get(name)
	if text == "" {
		return time.Time{}, nil
	}
	ms, err := strconv.ParseInt(text, 10, 64)
	if err != nil || ms < 0 {
		return time.Time{}, airlock.Invalidf(name, "give milliseconds since 1970", "%s is %.30q", name, text)
	}
	return time.UnixMilli(ms), nil
}

func (s *server) logsV1(w http.ResponseWriter, r *request) error {
	query := r.URL.Query()
	start, err := cursorOf(query, "start")
	if err != nil {
		return err
	}
	limit, err := limitOf(query, maxLogs)
	if err != nil {
		return err
	}
	id, err := r.sandboxID()
	if err != nil {
		return err
	}
	events, err := s.Sandboxes.Logs(r.Context(), r.caller, id)
	if err != nil {
		return err
	}
	events = slices.DeleteFunc(events, func(e control.Event) bool { return e.Time.Before(start) })
	page := entries(events[:min(limit, len(events))])
	type line struct {
		Timestamp time.Time `json:"timestamp"`
		Line      string    `json:"line"`
	}
	lines := make([]line, len(page))
	for i, e := range page {
		lines[i] = line{e.Timestamp, e.Message}
	}
	writeJSON(w, http.StatusOK, map[string]any{"logs": lines, "logEntries": page})
	return nil
}

func (s *server) logsV2(w http.ResponseWriter, r *request) error {
	query := r.URL.Query()
	cursor, err := cursorOf(query, "cursor")
	if err != nil {
		return err
	}
	limit, err := limitOf(query, maxLogs)
	if err != nil {
		return err
	}
	backward := false
	switch direction := query.Get("direction"); direction {
	case "", "forward":
	case "backward":
		backward = true
	default:
		return airlock.Invalidf("direction", "use forward or backward", "direction is %.20q", direction)
	}
	id, err := r.sandboxID()
	if err != nil {
		return err
	}
	events, err := s.Sandboxes.Logs(r.Context(), r.caller, id)
	if err != nil {
		return err
	}
	if backward {
		slices.Reverse(events)
	}
	level, search := query.Get("level"), query.Get("search")
	events = slices.DeleteFunc(events, func(e control.Event) bool {
		// Both directions include the cursor's millisecond.
		at := e.Time.Truncate(time.Millisecond)
		outside := !cursor.IsZero() && (!backward && at.Before(cursor) || backward && at.After(cursor))
		return outside || level != "" && e.Level != level || !strings.Contains(e.Message, search)
	})
	writeJSON(w, http.StatusOK, map[string]any{"logs": entries(events[:min(limit, len(events))])})
	return nil
}

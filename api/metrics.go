package api

import (
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/control"
)

// metricBody is what a sandbox used at one time.
type metricBody struct {
	Timestamp     time.Time `json:"timestamp"`
	TimestampUnix int64     `json:"timestampUnix"`
	CPUCount      int       `json:"cpuCount"`
	CPUUsedPct    float64   `json:"cpuUsedPct"`
	MemUsed       int64     `json:"memUsed"`
	MemTotal      int64     `json:"memTotal"`
	MemCache      int64     `json:"memCache"`
	DiskUsed      int64     `json:"diskUsed"`
	DiskTotal     int64     `json:"diskTotal"`
}

func metricOf(sb airlock.Sandbox, m control.Metric) metricBody {
	return metricBody{
		Timestamp: m.Time, TimestampUnix: m.Time.Unix(), CPUCount: listed(sb).CPUCount, CPUUsedPct: m.CPUPercent,
		MemUsed: m.MemoryUsed, MemTotal: m.MemoryMost, DiskUsed: m.DiskUsed, DiskTotal: m.DiskMost,
	}
}

// secondsOf reads a time in seconds; def is what none means.
func secondsOf(query url.Values, name string, def time.Time) (time.Time, error) {
	text := query.Get(name)
	if text == "" {
		return def, nil
	}
	s, err := strconv.ParseInt(text, 10, 64)
	if err != nil || s < 0 || s > 1<<40 {
		return time.Time{}, airlock.Invalidf(name, "give seconds since 1970", "%s is %.30q", name, text)
	}
	return time.Unix(s, 0), nil
}

func (s *server) sandboxMetrics(w http.ResponseWriter, r *request) error {
	query := r.URL.Query()
	from, err := secondsOf(query, "start", time.Time{})
	if err != nil {
		return err
	}
	to, err := secondsOf(query, "end", time.Now())
	if err != nil {
		return err
	}
	if query.Get("end") != "" {
		to = to.Add(time.Second - 1) // all of its second
	}
	if to.Before(from) {
		return airlock.Invalidf("end", "give an end after the start", "the end is before the start")
	}
	id, err := r.sandboxID()
	if err != nil {
		return err
	}
	sb, err := s.Sandboxes.Get(r.Context(), r.caller, id)
	if err != nil {
		return err
	}
	all, err := s.Sandboxes.Metrics(r.Context(), r.caller, id, from, to)
	if err != nil {
		return err
	}
	out := make([]metricBody, len(all))
	for i, m := range all {
		out[i] = metricOf(sb, m)
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

// allMetrics answers the newest metric of each sandbox that is asked for and
// that the caller has.
func (s *server) allMetrics(w http.ResponseWriter, r *request) error {
	ids := listValues(r.URL.Query(), "sandbox_ids")
	if len(ids) == 0 || len(ids) > maxPage {
		return airlock.Invalidf("sandbox_ids", fmt.Sprintf("give 1 to %d, joined by commas", maxPage), "sandbox_ids has %d ids", len(ids))
	}
	out := map[string]metricBody{}
	for _, id := range ids {
		sb, err := s.Sandboxes.Get(r.Context(), r.caller, baseID(id))
		if airlock.CodeOf(err) == airlock.NotFound && err != nil {
			continue
		} else if err != nil {
			return err
		}
		if m, found := s.Sandboxes.LastMetric(r.Context(), r.caller, sb.ID); found {
			out[sb.ID] = metricOf(sb, m)
		}
	}
	writeJSON(w, http.StatusOK, map[string]any{"sandboxes": out})
	return nil
}

// envdMetrics is what a sandbox uses now. Memory and disk are what the guest
// says: they are for its owner, not evidence.
func (s *server) envdMetrics(w http.ResponseWriter, r *request) error {
	u, err := r.guest.Usage(r.Context())
	if err != nil {
		return err
	}
	m, err := r.guest.Metric(r.Context())
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, map[string]any{
		"ts": m.Time.Unix(), "cpu_count": listed(r.guest.Sandbox).CPUCount, "cpu_used_pct": m.CPUPercent,
		"mem_total": u.MemoryTotal, "mem_used": u.MemoryUsed, "mem_cache": 0,
		"mem_total_mib": u.MemoryTotal >> 20, "mem_used_mib": u.MemoryUsed >> 20,
		"disk_used": u.DiskUsed, "disk_total": u.DiskTotal,
	})
	return nil
}

// teams is the caller's team, in the form that E2B's command line reads. The
// key in it is the one that was sent: keys are not kept.
func (s *server) teams(w http.ResponseWriter, r *request) error {
	writeJSON(w, http.StatusOK, []map[string]any{
		{"teamID": r.caller.Team, "name": r.caller.Team, "apiKey": apiKey(r.Header), "isDefault": true},
	})
	return nil
}

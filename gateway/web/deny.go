package web

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"airlock.dev/airlock"
)

// The headers of answers that are the gateway's own. Upstream cannot set them.
const (
	headerDenied = "X-Airlock-Denied" // the policies that denied, or "gateway"
	headerError  = "X-Airlock-Error"  // "upstream": what was permitted failed
)

// Denied is why something may not cross.
type Denied struct {
	Status   int      // of the answer; 403 if it is 0
	Policies []string // the rules that denied it
	Reason   string
	Ask      string // what to do about it
}

func (d *Denied) Error() string {
	text := "denied: " + d.Reason
	if len(d.Policies) > 0 {
		text += " (" + strings.Join(d.Policies, ", ") + ")"
	}
	if d.Ask != "" {
		text += ": " + d.Ask
	}
	return text
}

func (d *Denied) status() int {
	if d.Status == 0 {
		return http.StatusForbidden
	}
	return d.Status
}

func disagrees(what, says string, at place) *Denied {
	return &Denied{
		Status: http.StatusMisdirectedRequest,
		Reason: fmt.Sprintf("%s is %.300q, but the connection goes to %s", what, says, authority("", at.host, at.port)),
		Ask:    "open a connection of its own for each host",
	}
}

// undecided makes a denial of any error of a decision.
func undecided(err error) *Denied {
	if d, ok := errors.AsType[*Denied](err); ok {
		return d
	}
	d := &Denied{Status: http.StatusServiceUnavailable, Reason: "it could not be decided"}
	if e, ok := errors.AsType[*airlock.Error](err); ok && e.Code != airlock.Internal {
		d.Reason = e.Message
		d.Ask = e.Hint
		if e.Code == airlock.Exhausted {
			d.Status = http.StatusTooManyRequests
		}
	}
	return d
}

// deny answers a request that may not cross.
func deny(w http.ResponseWriter, r *http.Request, d *Denied) {
	by := "gateway"
	if len(d.Policies) > 0 {
		by = strings.Join(d.Policies, ",")
	}
	w.Header().Set(headerDenied, headerText(by))
	tell(w, r, d.status(), d.Reason, d.Policies, d.Ask, d.Error())
}

// tell writes an answer of our own.
func tell(w http.ResponseWriter, r *http.Request, status int, message string, policies []string, ask, text string) {
	if policies == nil {
		policies = []string{}
	}
	var body []byte
	if wantsText(r) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		body = []byte(text + "\n")
	} else {
		w.Header().Set("Content-Type", "application/json")
		var err error
		body, err = json.Marshal(struct {
			Code    int      `json:"code"`
			Message string   `json:"message"`
			Policy  []string `json:"policy"`
			Ask     string   `json:"ask,omitempty"`
		}{status, message, policies, ask})
		if err != nil {
			panic(err) // strings and numbers only
		}
		body = append(body, '\n')
	}
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	w.Write(body)
}

// wantsText is whether the client asks for text and not for JSON.
func wantsText(r *http.Request) bool {
	accept := strings.ToLower(strings.Join(r.Header["Accept"], ","))
	return strings.Contains(accept, "text/") && !strings.Contains(accept, "json")
}

// headerText makes s fit a header.
func headerText(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, s)
	return s[:min(len(s), 256)]
}

package cli

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/client"
)

// crossing is one attempt of a sandbox to reach something outside, with what
// came of it. What the log does not say is empty.
type crossing struct {
	Event    uint64    `json:"event"`
	Time     time.Time `json:"time"`
	Sandbox  string    `json:"sandbox"`
	Action   string    `json:"action"`   // "http:request"
	Effect   string    `json:"effect"`   // permit, deny or hold
	Resource string    `json:"resource"` // host, or the secret's name
	Host     string    `json:"host,omitempty"`
	IP       string    `json:"ip,omitempty"`
	Port     int64     `json:"port,omitempty"`
	Scheme   string    `json:"scheme,omitempty"` // or protocol
	Method   string    `json:"method,omitempty"`
	Path     string    `json:"path,omitempty"` // sealed in the log
	Query    string    `json:"query,omitempty"`
	Policies []string  `json:"policies"`
	Reason   string    `json:"reason,omitempty"`
	Status   int64     `json:"status,omitempty"` // of HTTP
	BytesOut int64     `json:"bytesOut"`
	BytesIn  int64     `json:"bytesIn"`
	Millis   int64     `json:"durationMillis,omitempty"`
	Outcome  string    `json:"outcome,omitempty"` // ok, error or denied, and a code; empty while it goes on
}

func (a *app) auditCrossings() *cobra.Command {
	var last, summary bool
	cmd := &cobra.Command{
		Use:   "crossings SANDBOX | --last",
		Short: "Say what a sandbox reached outside: hosts, methods, paths, bytes, and the policy behind each",
		Long: `Crossings lists each name, connection, request and use of a secret that code in
a sandbox tried, in order, with the policies that decided and what came of it.
It reads the audit log, so the sandbox may be long gone. Paths and queries are
sealed there: opening them is for operators, and is recorded.

With --summary it is one line for each host instead, with how often it was
reached and denied, by which methods and policies, and all bytes.`,
		Example: `  airlock audit crossings i4k2m6t0q8w1x5z7v3yc
  airlock audit crossings --last --summary      # of the sandbox that was made last, as by airlock run
  airlock audit crossings i4k2m6t0q8w1x5z7v3yc --json | jq -r 'select(.effect=="permit") | .host' | sort -u`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 && last {
				return usage(cmd, "give either a sandbox or --last")
			}
			if last {
				return cobra.NoArgs(cmd, args)
			}
			return cobra.ExactArgs(1)(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if !last && !airlock.ValidSandboxID(args[0]) {
				return airlock.Invalidf("SANDBOX", "give the id that `airlock sandbox create` or `airlock run --json` printed", "%.60q is no sandbox's id", args[0])
			}
			c, err := a.server()
			if err != nil {
				return err
			}
			var id string
			if last {
				if id, err = newestSandbox(cmd, c); err != nil {
					return err
				}
			} else {
				id = args[0]
			}
			all, err := a.crossingsOf(cmd, c, id)
			if err != nil {
				return err
			}
			if summary {
				return a.printReached(reachedBy(all))
			}
			if a.json {
				for _, x := range all {
					if err := a.print(x, nil); err != nil {
						return err
					}
				}
				return nil
			}
			if len(all) == 0 {
				a.note("the audit log has no crossing of the sandbox %s", id)
				return nil
			}
			w := tabwriter.NewWriter(a.Stdout, 0, 8, 2, ' ', 0)
			// What is long and of all lengths is last: it makes no column wide.
			fmt.Fprintln(w, "EVENT\tTIME\tEFFECT\tSTATUS\tOUT\tIN\tPOLICY\tWHAT")
			for _, x := range all {
				what := x.what()
				if x.Effect == "deny" {
					what += ": " + x.Reason
				}
				fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%d\t%d\t%s\t%s\n", x.Event, x.Time.Format("15:04:05.000"), x.Effect, printable(x.status()), x.BytesOut, x.BytesIn, printable(cmp.Or(strings.Join(x.Policies, ","), "-")), printable(what))
			}
			return w.Flush()
		},
	}
	cmd.Flags().BoolVar(&last, "last", false, "of the sandbox that was made last")
	cmd.Flags().BoolVar(&summary, "summary", false, "one line for each host")
	return cmd
}

// newestSandbox is the one that was made last, of those whose events the
// caller may read.
func newestSandbox(cmd *cobra.Command, c *client.Client) (string, error) {
	page, err := c.AuditEvents(cmd.Context(), client.AuditQuery{Query: "type=sandbox.create effect=permit", Newest: true, Limit: 1})
	if err != nil {
		return "", err
	}
	var e struct{ Sandbox string }
	if len(page.Events) > 0 {
		if err := json.Unmarshal(page.Events[0], &e); err != nil {
			return "", fmt.Errorf("read an event: %w", err)
		}
	}
	if e.Sandbox == "" {
		return "", airlock.Errorf(airlock.NotFound, "the audit log has no sandbox yet: make one with `airlock run`")
	}
	return e.Sandbox, nil
}

// reached is what a sandbox did with one host.
type reached struct {
	Host      string   `json:"host"`
	Crossings int      `json:"crossings"` // requests and connections that were permitted
	Denied    int      `json:"denied"`    // of all kinds
	Methods   []string `json:"methods"`
	Paths     []string `json:"paths"` // each once, sorted; without those that the caller may not read
	BytesOut  int64    `json:"bytesOut"`
	BytesIn   int64    `json:"bytesIn"`
	Policies  []string `json:"policies"` // that permitted
	Deniers   []string `json:"deniers"`  // policies that denied
}

// reachedBy sums crossings up by their hosts, in the order of their first.
func reachedBy(all []*crossing) []*reached {
	var sums []*reached
	by := map[string]*reached{}
	for _, x := range all {
		r := by[x.Host]
		if r == nil {
			r = &reached{Host: x.Host, Methods: []string{}, Paths: []string{}, Policies: []string{}, Deniers: []string{}}
			by[x.Host] = r
			sums = append(sums, r)
		}
		add := func(to *[]string, values ...string) {
			for _, v := range values {
				if i, found := slices.BinarySearch(*to, v); !found && v != "" {
					*to = slices.Insert(*to, i, v)
				}
			}
		}
		r.BytesOut += x.BytesOut
		r.BytesIn += x.BytesIn
		denied := x.Effect == "deny" || strings.HasPrefix(x.Outcome, "denied")
		if x.Effect == "deny" {
			add(&r.Deniers, x.Policies...)
		}
		switch {
		case x.Action == "secret:use": // the request that it was for is counted
		case denied:
			r.Denied++
		case x.Effect == "permit" && x.Action != "dns:resolve": // what was held is permitted, or denied, by a second one
			r.Crossings++
			add(&r.Methods, x.Method)
			add(&r.Paths, x.Path)
			add(&r.Policies, x.Policies...)
		}
	}
	return sums
}

func (a *app) printReached(sums []*reached) error {
	if a.json {
		for _, r := range sums {
			if err := a.print(r, nil); err != nil {
				return err
			}
		}
		return nil
	}
	w := tabwriter.NewWriter(a.Stdout, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "HOST\tREACHED\tDENIED\tPATHS\tOUT\tIN\tMETHODS\tPOLICIES")
	for _, r := range sums {
		fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%d\t%d\t%s\t%s\n", printable(r.Host), r.Crossings, r.Denied, len(r.Paths), r.BytesOut, r.BytesIn,
			printable(cmp.Or(strings.Join(r.Methods, ","), "-")), printable(cmp.Or(strings.Join(slices.Concat(r.Policies, r.Deniers), ","), "-")))
	}
	return w.Flush()
}

func (x crossing) what() string {
	target := fmt.Sprintf("%s:%d", x.Host, x.Port)
	switch x.Action {
	case "http:request":
		return fmt.Sprintf("%s %s://%s%s", x.Method, x.Scheme, target, cmp.Or(x.Path, "/(sealed)"))
	case "net:connect":
		return fmt.Sprintf("connect %s %s", x.Scheme, target)
	case "secret:use":
		return fmt.Sprintf("secret %s for %s %s", x.Resource, x.Method, target)
	}
	return "resolve " + x.Resource
}

func (x crossing) status() string {
	if x.Status != 0 {
		return fmt.Sprint(x.Status)
	}
	return cmp.Or(x.Outcome, "-")
}

// crossingsOf joins attempts with their ends.
func (a *app) crossingsOf(cmd *cobra.Command, c *client.Client, sandbox string) ([]*crossing, error) {
	q := client.AuditQuery{Query: "sandbox=" + sandbox + " type=dns.*,net.*,http.*,secret.*", Limit: audit.MaxPage, Details: true}
	var all []*crossing
	by := map[uint64]*crossing{}
	for {
		page, err := c.AuditEvents(cmd.Context(), q)
		if airlock.CodeOf(err) == airlock.Denied && q.Details {
			q.Details = false // an auditor's key
			continue
		}
		if err != nil {
			return nil, err
		}
		for i, raw := range page.Events {
			var e struct {
				Seq      uint64
				Time     time.Time
				Sandbox  string
				Call     audit.Call
				Decision audit.Decision
				Outcome  audit.Outcome
				Of       *uint64
			}
			if err := json.Unmarshal(raw, &e); err != nil {
				return nil, fmt.Errorf("read an event: %w", err)
			}
			if e.Call.Action == "" { // the end of one
				if e.Of != nil && by[*e.Of] != nil {
					by[*e.Of].end(e.Outcome)
				}
				continue
			}
			x := &crossing{Event: e.Seq, Time: e.Time, Sandbox: e.Sandbox, Action: e.Call.Action, Effect: e.Decision.Effect, Resource: e.Call.Resource.ID, Policies: e.Decision.Policies, Reason: e.Decision.Reason}
			x.context(e.Call.Context)
			if i < len(page.Details) {
				for _, d := range page.Details[i] {
					var sealed struct {
						Context map[string]any
						Query   string
						Reason  string
					}
					if json.Unmarshal(d.Detail, &sealed) == nil {
						x.context(sealed.Context)
						x.Query = sealed.Query
						x.Reason = cmp.Or(sealed.Reason, x.Reason)
					}
				}
			}
			x.Host = cmp.Or(x.Host, x.Resource)
			all = append(all, x)
			by[x.Event] = x
		}
		if page.Next == "" {
			a.behind(page)
			return all, nil
		}
		q.After = page.Next
	}
}

func (x *crossing) context(c map[string]any) {
	text := func(into *string, names ...string) {
		for _, name := range names {
			if v, ok := c[name].(string); ok {
				*into = v
			}
		}
	}
	text(&x.Host, "host")
	text(&x.IP, "ip")
	text(&x.Scheme, "scheme", "protocol")
	text(&x.Method, "method")
	text(&x.Path, "path")
	if v, ok := c["port"].(float64); ok {
		x.Port = int64(v)
	}
}

func (x *crossing) end(o audit.Outcome) {
	x.Outcome = strings.TrimSpace(o.Status + " " + o.Code)
	x.Status, x.BytesOut, x.BytesIn, x.Millis = o.Counts["status"], o.Counts["bytesOut"], o.Counts["bytesIn"], o.Counts["durationMicros"]/1000
}

package cli

import (
	"cmp"
	"encoding/json"
	"fmt"
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
	return &cobra.Command{
		Use:   "crossings SANDBOX",
		Short: "Say what a sandbox reached outside: hosts, methods, paths, bytes, and the policy behind each",
		Long: `Crossings lists each name, connection, request and use of a secret that code in
a sandbox tried, in order, with the policies that decided and what came of it.
It reads the audit log, so the sandbox may be long gone. Paths and queries are
sealed there: opening them is for operators, and is recorded.`,
		Example: `  airlock audit crossings i4k2m6t0q8w1x5z7v3yc
  airlock audit crossings i4k2m6t0q8w1x5z7v3yc --json | jq -r 'select(.effect=="permit") | .host' | sort -u`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if !airlock.ValidSandboxID(args[0]) {
				return airlock.Invalidf("SANDBOX", "give the id that `airlock sandbox create` or `airlock run --json` printed", "%.60q is no sandbox's id", args[0])
			}
			c, err := a.server()
			if err != nil {
				return err
			}
			all, err := crossingsOf(cmd, c, args[0])
			if err != nil {
				return err
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
				a.note("the audit log has no crossing of that sandbox")
				return nil
			}
			w := tabwriter.NewWriter(a.Stdout, 0, 8, 2, ' ', 0)
			fmt.Fprintln(w, "EVENT\tTIME\tEFFECT\tWHAT\tSTATUS\tOUT\tIN\tPOLICY")
			for _, x := range all {
				fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%d\t%d\t%s\n", x.Event, x.Time.Format("15:04:05.000"), x.Effect, printable(x.what()), printable(x.status()), x.BytesOut, x.BytesIn, printable(cmp.Or(strings.Join(x.Policies, ","), x.Reason)))
			}
			return w.Flush()
		},
	}
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
func crossingsOf(cmd *cobra.Command, c *client.Client, sandbox string) ([]*crossing, error) {
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

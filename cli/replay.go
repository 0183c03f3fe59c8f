package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"maps"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/client"
	"airlock.dev/airlock/policy"
)

func (a *app) policyReplay() *cobra.Command {
	var since, until, team string
	cmd := &cobra.Command{
		Use:   "replay DRAFT",
		Short: "Show which recorded acts a draft would decide otherwise",
		Long: `Replay decides the acts of the audit log again, with the directory DRAFT in the
place of the policies in force, and lists exactly those whose decision would
change. It opens sealed parts for that, which is recorded. Acts of which too
little is left, because details were erased or were too long, are counted.`,
		Example: `  airlock policy replay policies --since 24h`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			draft, err := loadPolicies(args[0])
			if problems, ok := err.(policy.Problems); ok {
				return a.problemsOf(problems)
			}
			if err != nil {
				return err
			}
			c, err := a.server()
			if err != nil {
				return err
			}
			query := "effect=permit,deny,hold since=" + strconv.Quote(since)
			if until != "" {
				query += " until=" + strconv.Quote(until)
			}
			if team != "" {
				query += " team=" + strconv.Quote(team)
			}
			r := replay{ctx: cmd.Context(), client: c, query: query, progress: a.Stderr, requests: map[string]string{}}
			changed := 0
			for change := range policy.Replay(draft, r.recorded()) {
				changed++
				if err := a.print(change, func(w io.Writer) { writeChange(w, change) }); err != nil {
					return err
				}
			}
			if r.err != nil {
				return r.err
			}
			summary := map[string]int{"acts": r.acts, "changed": changed, "undecidable": r.unknown}
			return a.print(summary, func(w io.Writer) {
				fmt.Fprintf(w, "%s, %d of them would be decided otherwise\n", counted(r.acts, "act"), changed)
				if r.unknown > 0 {
					fmt.Fprintf(w, "%d more cannot be decided again: their details were erased, or were too long to be kept whole\n", r.unknown)
				}
			})
		},
	}
	cmd.Flags().StringVar(&since, "since", "24h", "acts from then on: a time, a date, or how long ago, such as 7d")
	cmd.Flags().StringVar(&until, "until", "", "acts before then")
	cmd.Flags().StringVar(&team, "team", "", "acts of one team only")
	return cmd
}

func writeChange(w io.Writer, c policy.Change) {
	by := "nothing"
	if len(c.Would.Policies) > 0 {
		by = strings.Join(c.Would.Policies, ", ")
	}
	fmt.Fprintf(w, "%d  %s  %s  %s on %s: %s -> %s by %s\n", c.Seq, c.Time.Format("2006-01-02 15:04:05"),
		printable(c.Call.Principal.String()), printable(c.Call.Action), printable(c.Call.Resource.String()), c.Was.Effect, c.Would.Effect, printable(by))
}

// replay reads what was decided from the trail.
type replay struct {
	ctx      context.Context
	client   *client.Client
	query    string
	progress io.Writer
	requests map[string]string // by sandbox: the policies that its client asked for

	acts, unknown int
	err           error
}

// requestsMost bounds how many sandboxes' requests are remembered.
const requestsMost = 10_000

// replayEvery is how often a long replay says how far it is, in acts.
const replayEvery = 10_000

func (r *replay) recorded() iter.Seq[policy.Recorded] {
	return func(yield func(policy.Recorded) bool) {
		q := client.AuditQuery{Query: r.query, Limit: audit.MaxPage, Details: true}
		for {
			page, err := r.client.AuditEvents(r.ctx, q)
			if err == nil && len(page.Details) != len(page.Events) {
				err = airlock.Errorf(airlock.Internal, "the server sent the details of %d events instead of %d", len(page.Details), len(page.Events))
			}
			if err != nil {
				r.err = err
				return
			}
			for i, event := range page.Events {
				rec, whole, err := r.rebuild(event, page.Details[i])
				if err != nil {
					r.err = err
					return
				}
				if !whole {
					r.unknown++
					continue
				}
				if r.acts++; r.acts%replayEvery == 0 {
					fmt.Fprintf(r.progress, "%d acts, up to %s\n", r.acts, rec.Time.Format(time.RFC3339))
				}
				if !yield(rec) {
					return
				}
			}
			if page.Next == "" {
				return
			}
			q.After = page.Next
		}
	}
}

// rebuild makes of an event what was decided then. Not whole is one of which
// something is missing.
func (r *replay) rebuild(event json.RawMessage, details []audit.Detail) (rec policy.Recorded, whole bool, err error) {
	var e struct {
		policy.Recorded
		Sandbox string
		Clipped bool
		Sealed  []json.RawMessage
	}
	if err := json.Unmarshal(event, &e); err != nil {
		return rec, false, fmt.Errorf("read an event: %w", err)
	}
	rec = e.Recorded
	if e.Clipped || len(details) != len(e.Sealed) {
		return rec, false, nil
	}
	for _, d := range details {
		if d.Detail == nil {
			return rec, false, nil
		}
		var hidden struct {
			Clipped  bool
			Resource *string
			Context  policy.Context
		}
		if err := json.Unmarshal(d.Detail, &hidden); err != nil || hidden.Clipped {
			return rec, false, nil
		}
		if hidden.Resource != nil {
			rec.Call.Resource.ID = *hidden.Resource
		}
		if rec.Call.Context == nil {
			rec.Call.Context = policy.Context{}
		}
		maps.Copy(rec.Call.Context, hidden.Context)
	}
	switch {
	case e.Sandbox == "", rec.Call.Context["egressProxy"] == true: // decided by the ceiling alone
	case rec.Call.Action == "sandbox:network":
		// What holds from here on; it was decided by the one before.
		next := rec.Request
		text, found, err := r.request(e.Sandbox, rec.Seq)
		if err != nil {
			return rec, false, err
		}
		if rec.Decision.Effect != policy.Deny {
			r.remember(e.Sandbox, next)
		}
		if rec.Request = text; !found {
			return rec, false, nil
		}
	case rec.Request != "":
		r.remember(e.Sandbox, rec.Request)
	default:
		text, found, err := r.request(e.Sandbox, rec.Seq)
		if err != nil || !found {
			return rec, false, err
		}
		rec.Request = text
	}
	return rec, true, nil
}

func (r *replay) remember(sandbox, text string) {
	if len(r.requests) >= requestsMost {
		clear(r.requests)
	}
	r.requests[sandbox] = text
}

// request is what the client of a sandbox had asked for last, before an event.
func (r *replay) request(sandbox string, seq uint64) (text string, found bool, err error) {
	if text, known := r.requests[sandbox]; known {
		return text, text != "", nil
	}
	page, err := r.client.AuditEvents(r.ctx, client.AuditQuery{
		Query:  fmt.Sprintf("type=sandbox.create,sandbox.network effect=permit sandbox=%s seq<%d", strconv.Quote(sandbox), seq),
		Newest: true, Limit: 1,
	})
	if err != nil {
		return "", false, err
	}
	var e struct {
		Request string
		Clipped bool
	}
	if len(page.Events) == 1 {
		if err := json.Unmarshal(page.Events[0], &e); err != nil {
			return "", false, fmt.Errorf("read an event: %w", err)
		}
		if e.Clipped {
			e.Request = ""
		}
	}
	r.remember(sandbox, e.Request)
	return e.Request, e.Request != "", nil
}

func (a *app) policyReload() *cobra.Command {
	return &cobra.Command{
		Use:   "reload",
		Short: "Make the server read its directory of policies again",
		Long: `Reload loads the directory that serve was given with --policies. If anything in it
is wrong, all of what was in force stays, and the trail has the attempt. It says
what is in force with its digests: of all files together, and of what holds for
each team, as decisions in the trail have it.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.server()
			if err != nil {
				return err
			}
			p, err := c.ReloadPolicies(cmd.Context())
			if err != nil {
				return err
			}
			return a.print(p, func(w io.Writer) {
				fmt.Fprintf(w, "in force: %s for teams without a file of their own, and those of %s\n", printable(p.Name), counted(len(p.Teams), "team"))
				fmt.Fprintf(w, "  %s  %s\n", p.Loaded, printable(p.Source))
				for _, c := range p.Ceilings {
					fmt.Fprintf(w, "  %s  %s\n", c.SHA256, printable(c.Name))
				}
			})
		},
	}
}

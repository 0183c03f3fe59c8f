package cli

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/audit/tiles"
	"airlock.dev/airlock/client"
)

func (a *app) audit() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "audit",
		Short: "Read, verify, prove and keep the audit log",
		Long: `The audit log has every act on sandboxes and everything that led out of one:
who, what, decided how, and what came of it. It is a Merkle log: whoever changes
or removes anything is found out by anybody with a copy of its key and a head.
It is in parts (shards), one for each quarter, month or day, such as 2026-Q4.
docs/AUDIT.md describes its format, for verifiers of your own.

A query is terms that all must hold, such as
  team=acme sandbox=i1 type=exec.*,file.write effect=deny since=2h seq>=100
Keys: type, source, team, sandbox, execution, app, actor, action, resource,
effect, status, subject, of, since, until, seq; != negates; a comma is "or".
A subject is team:NAME or its pseudonym.`,
		Example: `  airlock audit query 'effect=deny since=24h'
  airlock audit tail
  airlock audit show 42
  airlock audit keys > keys.txt; airlock audit verify --keys keys.txt /backup/airlock/audit`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.auditQuery(), a.auditCrossings(), a.auditTail(), a.auditShow(), a.auditProve(), a.auditVerify(), a.auditExport(), a.auditKeys(), a.auditStatus(), a.auditRotate(), a.auditDrop(), a.auditErase(), a.auditHold())
	return cmd
}

// line is an event for a person.
func (a *app) line(w io.Writer, event []byte) {
	var e struct {
		Seq     uint64
		Time    time.Time
		Type    string
		Source  string
		Team    string
		Sandbox string
		Actor   audit.Actor
		Call    audit.Call
		Decision,
		_ struct {
			Effect   string
			Policies []string
		}
		Outcome audit.Outcome
		Of      *uint64
		Log     struct{ Shard, Hold, Subject, Damage string }
	}
	if err := json.Unmarshal(event, &e); err != nil {
		fmt.Fprintf(w, "not an event: %s\n", printable(err.Error()))
		return
	}
	var said []string
	add := func(format string, args ...any) { said = append(said, printable(fmt.Sprintf(format, args...))) }
	if e.Call.Resource.ID != "" {
		add("%s %s", e.Call.Resource.Type, e.Call.Resource.ID)
	}
	if e.Decision.Effect != "" {
		if by := strings.Join(e.Decision.Policies, ", "); by != "" {
			add("%s by %s", e.Decision.Effect, by)
		} else { // no policy permits it, or the gateway itself refused it: the details say
			add("%s", e.Decision.Effect)
		}
	}
	if e.Of != nil {
		add("of %d", *e.Of)
	}
	if e.Outcome.Status != "" {
		add("%s", strings.TrimSpace(e.Outcome.Status+" "+e.Outcome.Code))
	}
	if e.Outcome.ExitCode != nil {
		add("exit code %d", *e.Outcome.ExitCode)
	}
	for _, s := range []string{e.Outcome.Message, e.Log.Shard, e.Log.Hold, e.Log.Subject, e.Log.Damage} {
		if s != "" {
			add("%s", s)
		}
	}
	fmt.Fprintf(w, "%6d  %s  %-16s %-10s %-21s %s:%s  %s\n", e.Seq, e.Time.Format("2006-01-02 15:04:05.000"), printable(e.Type),
		printable(cmp.Or(e.Team, "-")), printable(cmp.Or(e.Sandbox, "-")), printable(e.Actor.Kind), printable(e.Actor.ID), strings.Join(said, "; "))
}

func (a *app) event(event []byte) {
	if a.json {
		fmt.Fprintf(a.Stdout, "%s\n", event)
		return
	}
	a.line(a.Stdout, event)
}

// behind tells that the newest events are not in what was printed.
func (a *app) behind(page client.AuditPage) {
	if page.Behind > 0 {
		fmt.Fprintf(a.Stderr, "of the newest events %d cannot be found yet\n", page.Behind)
	}
}

func (a *app) auditQuery() *cobra.Command {
	var limit int
	var oldest, all bool
	cmd := &cobra.Command{
		Use:   "query [TERM...]",
		Short: "Find events, the newest last",
		Args:  cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.server()
			if err != nil {
				return err
			}
			if all && cmd.Flags().Changed("limit") {
				return airlock.Invalidf("--limit", "give one of them", "--all and --limit do not go together")
			}
			if limit < 1 || limit > audit.MaxPage {
				return airlock.Invalidf("--limit", fmt.Sprintf("give a number from 1 to %d, or --all", audit.MaxPage), "--limit is %d", limit)
			}
			q := client.AuditQuery{Query: strings.Join(args, " "), Newest: !oldest && !all, Limit: limit}
			if all {
				q.Limit = audit.MaxPage
			}
			for {
				page, err := c.AuditEvents(cmd.Context(), q)
				if err != nil {
					return err
				}
				if q.Newest {
					slices.Reverse(page.Events)
				}
				for _, e := range page.Events {
					a.event(e)
				}
				if !all {
					a.behind(page)
					if page.Next != "" && !a.json {
						fmt.Fprintln(a.Stderr, "there are more: --all, a larger --limit, or a narrower query")
					}
					return nil
				}
				if page.Next == "" {
					a.behind(page)
					return nil
				}
				q.After = page.Next
			}
		},
	}
	cmd.Flags().IntVar(&limit, "limit", 100, "how many events")
	cmd.Flags().BoolVar(&oldest, "oldest", false, "the oldest that match instead of the newest")
	cmd.Flags().BoolVar(&all, "all", false, "all that match, oldest first")
	return cmd
}

func (a *app) auditTail() *cobra.Command {
	var from int64
	cmd := &cobra.Command{
		Use:   "tail [TERM...]",
		Short: "Show events as they come, until interrupted",
		Args:  cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.server()
			if err != nil {
				return err
			}
			var start *uint64
			if from >= 0 {
				n := uint64(from)
				start = &n
			}
			err = c.AuditFollow(cmd.Context(), strings.Join(args, " "), start, func(e json.RawMessage) error {
				a.event(e)
				return nil
			})
			if cmd.Context().Err() != nil {
				return nil
			}
			return err
		},
	}
	cmd.Flags().Int64Var(&from, "from", -1, "number of the event to begin with (default: what comes from now on)")
	return cmd
}

func seqArg(arg string) (uint64, error) {
	n, err := strconv.ParseUint(arg, 10, 63)
	if err != nil {
		return 0, airlock.Invalidf("SEQ", "`airlock audit query` shows the numbers", "%.40q is no number of an event", arg)
	}
	return n, nil
}

func (a *app) auditShow() *cobra.Command {
	var details bool
	cmd := &cobra.Command{
		Use:   "show SEQ",
		Short: "Show an event whole",
		Long: `Show prints an event. With --details it opens its sealed parts, such as the
arguments of a command; that is an act which is recorded too.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			seq, err := seqArg(args[0])
			if err != nil {
				return err
			}
			c, err := a.server()
			if err != nil {
				return err
			}
			e, err := c.AuditEvent(cmd.Context(), seq, details)
			if err != nil {
				return err
			}
			return a.print(e, func(w io.Writer) {
				var text bytes.Buffer
				json.Indent(&text, e.Event, "", "  ")
				fmt.Fprintln(w, text.String())
				for _, d := range e.Details {
					switch {
					case d.Erased:
						fmt.Fprintf(w, "details of %s: erased\n", printable(d.Subject))
					case d.Problem != "":
						fmt.Fprintf(w, "details of %s: %s\n", printable(d.Subject), printable(d.Problem))
					default:
						fmt.Fprintf(w, "details of %s: %s\n", printable(d.Subject), d.Detail)
					}
				}
			})
		},
	}
	cmd.Flags().BoolVar(&details, "details", false, "open the sealed parts, too")
	return cmd
}

func (a *app) auditProve() *cobra.Command {
	var shard string
	var from, to uint64
	cmd := &cobra.Command{
		Use:   "prove SEQ | --shard SHARD --from SIZE --to SIZE",
		Short: "Prove that an event is in the log, or that the log only grew",
		Long: `Prove prints JSON: an event with its inclusion proof and the signed checkpoint,
or the consistency proof (RFC 6962) between two sizes of a part of the log, with
their roots. "airlock audit verify --proof" and anybody with the log's key can
check both.`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.server()
			if err != nil {
				return err
			}
			var proof any
			switch {
			case len(args) == 1:
				seq, err := seqArg(args[0])
				if err != nil {
					return err
				}
				if proof, err = c.AuditProof(cmd.Context(), seq); err != nil {
					return err
				}
			case shard == "" || to == 0:
				return airlock.Invalidf("SEQ", "give an event's number, or --shard, --from and --to", "there is nothing to prove")
			default:
				if proof, err = c.AuditConsistency(cmd.Context(), shard, from, to); err != nil {
					return err
				}
			}
			text, err := json.MarshalIndent(proof, "", "  ")
			if err != nil {
				return err
			}
			fmt.Fprintf(a.Stdout, "%s\n", text)
			return nil
		},
	}
	cmd.Flags().StringVar(&shard, "shard", "", "part (shard) of the log, such as 2026-Q4")
	cmd.Flags().Uint64Var(&from, "from", 0, "its size then")
	cmd.Flags().Uint64Var(&to, "to", 0, "its size later")
	return cmd
}

func (a *app) auditKeys() *cobra.Command {
	var heads string
	cmd := &cobra.Command{
		Use:   "keys",
		Short: "Print the keys that verify the log, and its heads",
		Long: `Keys prints the verifier key of each part of the log, one a line: keep the first
one away from this machine. With --heads it writes the newest signed head of each
part to a directory: kept elsewhere, they find out a log that was put back.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.server()
			if err != nil {
				return err
			}
			shards, err := c.AuditShards(cmd.Context())
			if err != nil {
				return err
			}
			for _, s := range shards {
				if heads != "" {
					if err := os.MkdirAll(heads, 0o755); err != nil {
						return fmt.Errorf("make the directory: %w", err)
					}
					if !tiles.ValidShard(s.ID) {
						return airlock.Errorf(airlock.Internal, "the server named a part of the log %.40q", s.ID)
					}
					if err := os.WriteFile(filepath.Join(heads, s.ID), []byte(s.Checkpoint), 0o644); err != nil {
						return fmt.Errorf("write a head: %w", err)
					}
				}
				if err := a.print(s, func(w io.Writer) {
					if s.VKey != "" {
						fmt.Fprintln(w, s.VKey)
					}
				}); err != nil {
					return err
				}
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&heads, "heads", "", "directory to write the heads to")
	return cmd
}

func (a *app) auditVerify() *cobra.Command {
	var keys, proof string
	var heads []string
	cmd := &cobra.Command{
		Use:   "verify [DIR]",
		Short: "Verify a copy of the log, this machine's log, or a proof",
		Long: `Verify recomputes the whole log from its entries and names every alteration with
its place. DIR is an audit directory (DATA-DIR/audit, or a copy of one); without
it, this machine's. --keys is a file with the log's keys, one a line, that you
have kept; without it, and for this machine only, the running server is asked,
which proves less: whoever altered the log may have changed the key as well.
--head is a signed head that you have kept or that a witness gave you. Without one
nobody can tell that the newest events were removed.

It exits with 1 if anything is wrong.`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			vkeys, err := a.vkeys(cmd, keys, len(args) == 0 || proof != "")
			if err != nil {
				return err
			}
			if proof != "" {
				return a.verifyProof(proof, vkeys)
			}
			dir := filepath.Join(a.dataDir, "audit")
			if len(args) == 1 {
				dir = args[0]
			}
			var kept []string
			for _, h := range heads {
				text, err := os.ReadFile(h)
				if err != nil {
					return notReadable("--head", h, err)
				}
				kept = append(kept, string(text))
			}
			report, err := audit.Verify(cmd.Context(), dir, audit.VerifyOptions{VKeys: vkeys, Heads: kept})
			if err != nil {
				return err
			}
			if err := a.print(report, func(w io.Writer) { writeReport(w, report) }); err != nil {
				return err
			}
			if !report.OK {
				return &exit{code: exitFailure}
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&keys, "keys", "", "file with the log's keys")
	cmd.Flags().StringArrayVar(&heads, "head", nil, "file with a head that was kept; may be given again")
	cmd.Flags().StringVar(&proof, "proof", "", "`FILE` with a proof of \"airlock audit prove\" to verify instead of a log")
	return cmd
}

// vkeys reads the log's keys, or asks the server for them.
func (a *app) vkeys(cmd *cobra.Command, file string, mayAsk bool) ([]string, error) {
	if file != "" {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, notReadable("--keys", file, err)
		}
		vkeys := strings.Fields(string(text))
		if len(vkeys) == 0 {
			return nil, airlock.Invalidf("--keys", "give the file that `airlock audit keys` made, kept away from the log", "%s has no keys", file)
		}
		return vkeys, nil
	}
	if !mayAsk {
		return nil, airlock.Invalidf("--keys", "give the file that `airlock audit keys` made, kept away from the log", "a copy of a log cannot vouch for itself")
	}
	c, err := a.server()
	if err != nil {
		return nil, err
	}
	shards, err := c.AuditShards(cmd.Context())
	if err != nil {
		return nil, err
	}
	var all []string
	for _, s := range shards {
		if s.VKey != "" {
			all = append(all, s.VKey)
		}
	}
	return all, nil
}

// verifyProof checks either kind of what `airlock audit prove` prints.
func (a *app) verifyProof(file string, vkeys []string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return notReadable("--proof", file, err)
	}
	var kind struct {
		Event      *string
		Hashes     *[][]byte
		Checkpoint string
	}
	if err := json.Unmarshal(text, &kind); err != nil || kind.Checkpoint == "" || (kind.Event == nil) == (kind.Hashes == nil) {
		return airlock.Invalidf("--proof", "give what `airlock audit prove` printed, whole", "%s is not a proof at all", file).Because(err)
	}
	vkey, err := tiles.KeyOf(vkeys, kind.Checkpoint)
	if err != nil {
		return err
	}
	if kind.Event != nil {
		var p tiles.Proof
		if err := json.Unmarshal(text, &p); err != nil {
			return airlock.Invalidf("--proof", "give what `airlock audit prove` printed, whole", "%s is not a proof at all", file).Because(err)
		}
		if err := tiles.VerifyProof(p, vkey); err != nil {
			return err
		}
		return a.print(map[string]any{"ok": true, "seq": p.Seq}, func(w io.Writer) { fmt.Fprintf(w, "event %d is in the log\n", p.Seq) })
	}
	var p tiles.Consistency
	if err := json.Unmarshal(text, &p); err != nil {
		return airlock.Invalidf("--proof", "give what `airlock audit prove` printed, whole", "%s is not a proof at all", file).Because(err)
	}
	if err := tiles.VerifyConsistency(p, vkey); err != nil {
		return err
	}
	from, to := base64.StdEncoding.EncodeToString(p.FromRoot), base64.StdEncoding.EncodeToString(p.ToRoot)
	return a.print(map[string]any{"ok": true, "shard": p.Shard, "from": p.From, "fromRoot": from, "to": p.To, "toRoot": to}, func(w io.Writer) {
		fmt.Fprintf(w, "part %s only grew: its first %s (root %s) are the beginning of its first %d (root %s)\n", printable(p.Shard), counted(p.From, "event"), from, p.To, to)
	})
}

func writeReport(w io.Writer, r audit.Report) {
	for _, p := range r.Problems {
		which := ""
		switch {
		case p.Events == 1:
			which = fmt.Sprintf(" event %d", p.Seq)
		case p.Events > 1:
			which = fmt.Sprintf(" events %d to %d", p.Seq, p.Seq+p.Events-1)
		}
		fmt.Fprintf(w, "%s: %s %s%s: %s\n", p.Kind, printable(p.Shard), printable(p.File), which, printable(p.Text))
	}
	for _, p := range r.Index {
		fmt.Fprintf(w, "index: %s\n", printable(p))
	}
	for _, n := range r.Notes {
		fmt.Fprintf(w, "note: %s: %s\n", printable(n.File), printable(n.Text))
	}
	if !r.OK {
		fmt.Fprintf(w, "FAILED: %s\n", counted(r.Count, "problem"))
		return
	}
	fmt.Fprintf(w, "OK: %s in %s\n", counted(r.Events, "event"), counted(len(r.Shards), "part"))
	for _, s := range r.Shards {
		fmt.Fprintf(w, "  %s  %s from %d on, root %s\n", s.ID, counted(s.Size, "event"), s.First, s.Root)
	}
}

// counted is a number of things.
func counted[N int | uint64](n N, thing string) string {
	many := thing + "s"
	if stem, ok := strings.CutSuffix(thing, "y"); ok {
		many = stem + "ies"
	}
	if n != 1 {
		thing = many
	}
	return fmt.Sprintf("%d %s", n, thing)
}

func (a *app) auditExport() *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "export [TERM...]",
		Short: "Write events for other systems: jsonl or ocsf",
		Long: `Export writes the events that match to standard output, one a line, the oldest
first: jsonl is the bytes that the log has; ocsf is version 1.6 of the Open
Cybersecurity Schema Framework, for a SIEM. Sealed parts stay sealed.`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if format != "jsonl" && format != "ocsf" {
				return airlock.Invalidf("--format", "use jsonl or ocsf", "--format: unknown format %.40q", format)
			}
			c, err := a.server()
			if err != nil {
				return err
			}
			q := client.AuditQuery{Query: strings.Join(args, " "), Limit: audit.MaxPage}
			for {
				page, err := c.AuditEvents(cmd.Context(), q)
				if err != nil {
					return err
				}
				for _, e := range page.Events {
					line := []byte(e)
					if format == "ocsf" {
						if line, err = audit.OCSF(e); err != nil {
							return err
						}
					}
					if _, err := fmt.Fprintf(a.Stdout, "%s\n", line); err != nil {
						return err
					}
				}
				if page.Next == "" {
					return nil
				}
				q.After = page.Next
			}
		},
	}
	cmd.Flags().StringVar(&format, "format", "jsonl", "jsonl or ocsf")
	return cmd
}

func (a *app) auditStatus() *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Show how the log does",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.server()
			if err != nil {
				return err
			}
			s, err := c.AuditStatus(cmd.Context())
			if err != nil {
				return err
			}
			return a.print(s, func(w io.Writer) {
				t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
				fmt.Fprintf(t, "installation\t%s\npart\t%s\nepoch\t%d\n", s.Installation, s.Shard, s.Epoch)
				fmt.Fprintf(t, "durable\t%s\nin the tree\t%d\nsigned\t%d\nfound by queries\t%d\n", counted(s.Durable, "event"), s.Integrated, s.Published, s.Indexed)
				problem := "none"
				if s.Problem != "" {
					problem = printable(s.Problem)
				}
				fmt.Fprintf(t, "problem\t%s\n", problem)
				t.Flush()
			})
		},
	}
}

func (a *app) auditRotate() *cobra.Command {
	return &cobra.Command{
		Use:   "rotate",
		Short: "Begin a new part of the log now",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.server()
			if err != nil {
				return err
			}
			shard, err := c.AuditRotate(cmd.Context())
			if err != nil {
				return err
			}
			return a.print(map[string]string{"shard": shard}, func(w io.Writer) { fmt.Fprintln(w, shard) })
		},
	}
}

func (a *app) auditDrop() *cobra.Command {
	return &cobra.Command{
		Use:   "drop SHARD",
		Short: "Remove the events of a closed part; its signed head stays",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.server()
			if err != nil {
				return err
			}
			if err := c.AuditDrop(cmd.Context(), args[0]); err != nil {
				return err
			}
			return a.print(map[string]string{"dropped": args[0]}, func(io.Writer) {})
		},
	}
}

func (a *app) auditErase() *cobra.Command {
	return &cobra.Command{
		Use:   "erase SUBJECT",
		Short: "Destroy the key of a subject's details, here and in every copy",
		Long: `Erase destroys the key that a subject's sealed details were encrypted with. Nobody
can read them any more, in no copy of the log, and the log still verifies. It
cannot be undone. The subjects are team:NAME today, one for each team: paths,
programs and arguments of its sandboxes are sealed for it.`,
		Example: `  airlock audit query subject=team:acme      # what is sealed for it
  airlock audit erase team:acme`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.server()
			if err != nil {
				return err
			}
			pseudonym, err := c.AuditErase(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return a.print(map[string]string{"erased": pseudonym}, func(w io.Writer) { fmt.Fprintf(w, "erased %s\n", printable(pseudonym)) })
		},
	}
}

func (a *app) auditHold() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "hold",
		Short: "Legal holds: while one is in force nothing is dropped or erased",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var reason, until string
	set := &cobra.Command{
		Use:   "set NAME",
		Short: "Begin a hold, or change it",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			d, err := parseDays("--for", until)
			if err != nil {
				return err
			}
			c, err := a.server()
			if err != nil {
				return err
			}
			h, err := c.AuditHold(cmd.Context(), audit.Hold{Name: args[0], Reason: reason, Until: time.Now().Add(d)})
			if err != nil {
				return err
			}
			return a.print(h, func(w io.Writer) {
				fmt.Fprintf(w, "%s holds until %s\n", printable(h.Name), h.Until.Format(time.RFC3339))
			})
		},
	}
	set.Flags().StringVar(&reason, "reason", "", "what it is for")
	set.Flags().StringVar(&until, "for", "365d", "how long, such as 365d")
	list := &cobra.Command{
		Use:   "list",
		Short: "List the holds in force",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.server()
			if err != nil {
				return err
			}
			holds, err := c.AuditHolds(cmd.Context())
			if err != nil {
				return err
			}
			for _, h := range holds {
				if err := a.print(h, func(w io.Writer) {
					fmt.Fprintf(w, "%s  until %s  %s\n", printable(h.Name), h.Until.Format(time.RFC3339), printable(h.Reason))
				}); err != nil {
					return err
				}
			}
			return nil
		},
	}
	release := &cobra.Command{
		Use:   "release NAME",
		Short: "End a hold before its time",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.server()
			if err != nil {
				return err
			}
			if err := c.AuditRelease(cmd.Context(), args[0]); err != nil {
				return err
			}
			return a.print(map[string]string{"released": args[0]}, func(io.Writer) {})
		},
	}
	cmd.AddCommand(set, list, release)
	return cmd
}

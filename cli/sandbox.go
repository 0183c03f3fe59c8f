package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"airlock.dev/airlock"
	"airlock.dev/airlock/client"
)

func (a *app) sandbox() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "sandbox",
		Aliases: []string{"sandboxes"},
		Short:   "Create sandboxes on a server and work in them",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return cmd.Help()
		},
	}
	cmd.AddCommand(a.sandboxCreate(), a.sandboxList(), a.sandboxExec(), a.sandboxShell(), a.sandboxCopy(), a.sandboxForward(), a.sandboxLogs(), a.sandboxKill())
	return cmd
}

// traced is a new sandbox, and where the time of its create went.
type traced struct {
	client.Info
	Trace []client.Step `json:"trace"`
}

func (a *app) sandboxCreate() *cobra.Command {
	var (
		limits   limitFlags
		timeout  time.Duration
		vars     []string
		metadata []string
		template string
		net      netFlags
		trace    bool
	)
	cmd := &cobra.Command{
		Use:   "create",
		Short: "Create a sandbox and print its id",
		Example: `  id=$(airlock sandbox create --timeout 1h --memory 1GiB)
  airlock sandbox exec $id -- python3 -c 'print(1)'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx := cmd.Context()
			if err := life("--timeout", timeout); err != nil {
				return err
			}
			l, err := limits.limits()
			if err != nil {
				return err
			}
			req := client.CreateRequest{Template: template, Timeout: timeout, Limits: l}
			if req.Profile, req.Policy, err = net.asks(); err != nil {
				return err
			}
			if req.Secrets, err = net.wanted(); err != nil {
				return err
			}
			if req.Env, err = pairs("--env", vars); err != nil {
				return err
			}
			if req.Metadata, err = pairs("--metadata", metadata); err != nil {
				return err
			}
			c, err := a.server()
			if err != nil {
				return err
			}
			s, err := c.Create(ctx, req)
			if err != nil {
				return net.named(err)
			}
			if trace {
				return a.print(traced{s.Info, s.Timing}, func(w io.Writer) {
					fmt.Fprintln(w, s.ID)
					for _, step := range s.Timing {
						fmt.Fprintf(a.Stderr, "%-10s %8.2f ms\n", step.Name, step.Milliseconds)
					}
				})
			}
			return a.print(s.Info, func(w io.Writer) { fmt.Fprintln(w, s.ID) })
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&template, "template", "base", "what it starts from")
	flags.BoolVar(&trace, "trace", false, "say where the time of the create went")
	net.add(cmd)
	flags.DurationVar(&timeout, "timeout", 5*time.Minute, "kill it after this time")
	flags.StringArrayVarP(&vars, "env", "e", nil, "NAME=VALUE of a variable of all its processes; may be repeated")
	flags.StringArrayVar(&metadata, "metadata", nil, "NAME=VALUE of a label; may be repeated")
	limits.add(cmd)
	return cmd
}

func (a *app) sandboxList() *cobra.Command {
	var metadata []string
	cmd := &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List the running sandboxes, newest first",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			labels, err := pairs("--metadata", metadata)
			if err != nil {
				return err
			}
			c, err := a.server()
			if err != nil {
				return err
			}
			list, err := c.List(cmd.Context(), labels)
			if err != nil {
				return err
			}
			if a.json {
				for _, s := range list {
					if err := a.print(s, nil); err != nil {
						return err
					}
				}
				return nil
			}
			now := time.Now()
			w := tabwriter.NewWriter(a.Stdout, 0, 8, 2, ' ', 0)
			fmt.Fprintln(w, "ID\tSTATE\tTEMPLATE\tAGE\tREMAINING\tCPUS\tMEMORY\tDISK\tMETADATA")
			for _, s := range list {
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%g\t%d MiB\t%d MiB\t%s\n", s.ID, s.State, s.Template(),
					span(now.Sub(s.StartedAt)), span(s.EndAt.Sub(now)), s.Limits.CPUs, s.Limits.MemoryMB, s.Limits.DiskMB, labelText(s.Metadata))
			}
			return w.Flush()
		},
	}
	cmd.Flags().StringArrayVar(&metadata, "metadata", nil, "only those with the label NAME=VALUE; may be repeated")
	return cmd
}

// span writes a duration in its two largest units.
func span(d time.Duration) string {
	d = max(d, 0).Round(time.Second)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", d/time.Minute, d%time.Minute/time.Second)
	}
	return fmt.Sprintf("%dh%02dm", d/time.Hour, d%time.Hour/time.Minute)
}

func labelText(m map[string]string) string {
	var parts []string
	for k, v := range m {
		parts = append(parts, printable(k)+"="+printable(v))
	}
	slices.Sort(parts)
	return strings.Join(parts, ",")
}

// printable keeps what a client or a sandbox wrote from steering the terminal.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r >= 0x7f && r < 0xa0 {
			return '?'
		}
		return r
	}, s)
}

// oneID wants an id as the first argument.
func oneID(args []string) error {
	if !airlock.ValidSandboxID(args[0]) {
		return airlock.Invalidf("id", "`airlock sandbox list` shows the ids", "%q is no sandbox id", args[0])
	}
	return nil
}

func (a *app) sandboxExec() *cobra.Command {
	var (
		input     bool
		user, cwd string
		vars      []string
		timeout   time.Duration
	)
	cmd := &cobra.Command{
		Use:   "exec ID [flags] -- COMMAND [ARGUMENT...]",
		Short: "Run a command in a sandbox",
		Long: `Exec runs a command in a running sandbox. Its output and exit code are the
command's own. Interrupting airlock kills it.

` + ExitCodes,
		Example: `  airlock sandbox exec $id -- python3 -c 'print(6 * 7)'
  airlock sandbox exec $id --user root -- apt list --installed
  tar -C project -c . | airlock sandbox exec -i $id -- tar -x`,
		Annotations: map[string]string{runsPrograms: "yes"},
		Args: func(cmd *cobra.Command, args []string) error {
			dash := cmd.ArgsLenAtDash()
			switch {
			case len(args) == 0 || dash == 0:
				return usage(cmd, "name a sandbox")
			case dash > 1 || dash < 0 && len(args) > 1:
				return usage(cmd, "put the command after --")
			case len(args) == 1:
				return usage(cmd, "no command: put it after --")
			}
			return oneID(args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			m, err := pairs("--env", vars)
			if err != nil {
				return err
			}
			if timeout != 0 {
				if err := life("--timeout", timeout); err != nil {
					return err
				}
			}
			c, err := a.server()
			if err != nil {
				return err
			}
			s, err := c.Get(ctx, args[0])
			if err != nil {
				return err
			}
			req := ExecRequest{Cmd: args[1], Args: args[2:], Env: m, Cwd: cwd, User: user, Timeout: timeout}
			if input {
				req.Stdin = a.Stdin
			}
			result, err := a.exec(ctx, s, req)
			if err != nil {
				if ctx.Err() != nil {
					return &exit{128 + int(syscall.SIGINT), ctx.Err()}
				}
				return err
			}
			return a.end(result, "")
		},
	}
	flags := cmd.Flags()
	flags.BoolVarP(&input, "interactive", "i", false, "pass standard input on")
	flags.StringVarP(&user, "user", "u", "", "run as this user (default \"user\")")
	flags.StringVarP(&cwd, "cwd", "w", "", "in this directory (default: the user's home)")
	flags.StringArrayVarP(&vars, "env", "e", nil, "NAME=VALUE of a variable; may be repeated")
	flags.DurationVar(&timeout, "timeout", 0, "kill it after this time; 0 is with the sandbox")
	return cmd
}

var inSandbox = regexp.MustCompile(`^([a-z0-9]{1,32}):(.*)$`)

// place is one side of a copy.
type place struct{ id, path string } // id is empty for local ones

func parsePlace(s string) place {
	if m := inSandbox.FindStringSubmatch(s); m != nil {
		return place{m[1], m[2]}
	}
	return place{path: s}
}

func (a *app) sandboxCopy() *cobra.Command {
	var user string
	cmd := &cobra.Command{
		Use:   "cp LOCAL ID:PATH | ID:PATH LOCAL",
		Short: "Copy a file into a sandbox or out of it",
		Long: `Cp copies one file. LOCAL may be - for standard input or output; write ./a:b for
a local name with a colon. PATH is relative to the user's home, and may end in /
to keep the name.`,
		Example: `  airlock sandbox cp data.csv $id:data.csv
  airlock sandbox cp $id:result.json -
  tar -C project -c . | airlock sandbox exec -i $id -- tar -x      # a directory`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			from, to := parsePlace(args[0]), parsePlace(args[1])
			switch {
			case from.id == "" && to.id == "":
				return usage(cmd, "neither side is in a sandbox: write ID:PATH")
			case from.id != "" && to.id != "":
				return usage(cmd, "both sides are in a sandbox: copy through a local file or -")
			case from.id != "" && from.path == "":
				return usage(cmd, "no path after %s:", from.id)
			}
			if from.id != "" {
				return a.download(cmd.Context(), from, to.path, user)
			}
			return a.upload(cmd.Context(), from.path, to, user)
		},
	}
	cmd.Flags().StringVarP(&user, "user", "u", "", "as this user of the sandbox (default \"user\")")
	return cmd
}

type copied struct {
	Path  string `json:"path"`
	Bytes int64  `json:"bytes"`
}

func (a *app) upload(ctx context.Context, local string, to place, user string) error {
	var r io.Reader = a.Stdin
	var mode os.FileMode
	if local == "-" {
		if to.path == "" || strings.HasSuffix(to.path, "/") {
			return airlock.Invalidf("PATH", "write "+to.id+":NAME", "standard input has no name to keep")
		}
	} else {
		f, err := os.Open(local)
		if err != nil {
			return notReadable("LOCAL", local, err)
		}
		defer f.Close()
		info, err := f.Stat()
		if err != nil {
			return notReadable("LOCAL", local, err)
		}
		if info.IsDir() {
			return airlock.Invalidf("LOCAL", fmt.Sprintf("use tar: tar -C %s -c . | airlock sandbox exec -i %s -- tar -x", local, to.id), "%s is a directory", local)
		}
		if info.Mode().Perm()&0o111 != 0 {
			mode = 0o755
		}
		if to.path == "" || strings.HasSuffix(to.path, "/") {
			to.path += filepath.Base(local)
		}
		r = f
	}
	c, err := a.server()
	if err != nil {
		return err
	}
	s, err := c.Get(ctx, to.id)
	if err != nil {
		return err
	}
	count := &counter{r: r}
	if err := s.UploadAs(ctx, user, to.path, count, mode); err != nil {
		return err
	}
	return a.print(copied{to.path, count.n}, func(io.Writer) {})
}

type counter struct {
	r io.Reader
	n int64
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}

func (a *app) download(ctx context.Context, from place, local, user string) error {
	if info, err := os.Stat(local); local != "-" && err == nil && info.IsDir() || strings.HasSuffix(local, "/") {
		local = filepath.Join(local, path.Base(from.path))
	}
	c, err := a.server()
	if err != nil {
		return err
	}
	s, err := c.Get(ctx, from.id)
	if err != nil {
		return err
	}
	if local == "-" {
		return s.DownloadAs(ctx, user, from.path, a.Stdout)
	}
	// The old file stays until the new one is whole.
	f, err := os.CreateTemp(filepath.Dir(local), ".airlock-")
	if err != nil {
		return notReadable("LOCAL", filepath.Dir(local), err)
	}
	defer os.Remove(f.Name())
	w := &writeCounter{w: f}
	err = s.DownloadAs(ctx, user, from.path, w)
	if err = errors.Join(err, f.Chmod(0o644), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), local); err != nil {
		return err
	}
	return a.print(copied{local, w.n}, func(io.Writer) {})
}

type writeCounter struct {
	w io.Writer
	n int64
}

func (c *writeCounter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}

func (a *app) sandboxLogs() *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use:     "logs ID",
		Aliases: []string{"log"},
		Short:   "Show what happened to a sandbox: its create, each exec, and what it tried outside",
		Long: `Logs shows what happened to a sandbox that runs: its create, each exec with its
outcome, and each request and connection that it tried, with what came of it and
the policy that decided. Of the last 1000; the audit log has all
(` + "`airlock audit crossings ID`" + `).`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := oneID(args); err != nil {
				return err
			}
			c, err := a.server()
			if err != nil {
				return err
			}
			return c.Logs(cmd.Context(), args[0], follow, func(e client.LogEntry) error {
				return a.print(e, func(w io.Writer) {
					var fields []string
					for k, v := range e.Fields {
						fields = append(fields, printable(k)+"="+printable(v))
					}
					slices.Sort(fields)
					fmt.Fprintf(w, "%s  %-5s %s\n", e.Timestamp.Local().Format("2006-01-02 15:04:05.000"), e.Level,
						strings.TrimSpace(printable(e.Message)+"  "+strings.Join(fields, " ")))
				})
			})
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on until the sandbox ends")
	return cmd
}

func (a *app) sandboxKill() *cobra.Command {
	return &cobra.Command{
		Use:   "kill ID...",
		Short: "Kill sandboxes; nothing of them is left",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			for i := range args {
				if err := oneID(args[i:]); err != nil {
					return err
				}
			}
			c, err := a.server()
			if err != nil {
				return err
			}
			var failed []error
			for _, id := range args {
				if err := c.Kill(cmd.Context(), id); err != nil {
					failed = append(failed, err)
					continue
				}
				if err := a.print(map[string]string{"killed": id}, func(io.Writer) {}); err != nil {
					return err
				}
			}
			for _, err := range failed[:max(len(failed)-1, 0)] {
				a.report(err)
			}
			if len(failed) > 0 {
				return failed[len(failed)-1]
			}
			return nil
		},
	}
}

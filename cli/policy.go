package cli

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"airlock.dev/airlock"
	"airlock.dev/airlock/policy"
)

func (a *app) policies() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "policy",
		Short: "Write, check and compare the policies of the operator",
		Long: `A directory of policies says what each team may do at most: all.cedar (forbids
for every team), default.cedar, teams/NAME.cedar and tests/NAME.yaml. Policies
are in Cedar, which reads like sentences. Only replay and reload need a server.`,
		Example: `  airlock policy init policies
  airlock policy validate policies && airlock policy test policies
  airlock policy explain call.json --dir policies
  airlock policy diff /etc/airlock/policies policies
  airlock policy replay policies --since 7d`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.policyInit(), a.policyValidate(), a.policyTest(), a.policyExplain(), a.policyDiff(), a.policyReplay(), a.policyReload())
	return cmd
}

func (a *app) policyInit() *cobra.Command {
	return &cobra.Command{
		Use:   "init DIR",
		Short: "Write a directory of policies to begin with",
		Long: `Init writes the default policies, an example of tests, and for readers the
profiles and the schema. DIR must be empty or not be there.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			dir := args[0]
			entries, err := os.ReadDir(dir)
			switch {
			case err == nil && len(entries) > 0:
				return &airlock.Error{Code: airlock.Exists, Field: "DIR", Message: dir + " is not empty", Hint: "name a new directory"}
			case err != nil && !errors.Is(err, os.ErrNotExist):
				return airlock.Invalidf("DIR", "name a new directory", "%s: %v", dir, err)
			}
			files := policy.Starter()
			var names []string
			for name := range files {
				names = append(names, name)
			}
			slices.Sort(names)
			if err := os.MkdirAll(filepath.Join(dir, "teams"), 0o755); err != nil {
				return fmt.Errorf("make the directory: %w", err)
			}
			for _, name := range names {
				path := filepath.Join(dir, filepath.FromSlash(name))
				if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
					return fmt.Errorf("make the directory: %w", err)
				}
				if err := os.WriteFile(path, []byte(files[name]), 0o644); err != nil {
					return fmt.Errorf("write a policy: %w", err)
				}
			}
			return a.print(map[string]any{"dir": dir, "files": names}, func(w io.Writer) {
				fmt.Fprintf(w, "wrote %s to %s: begin with its README.md\n", counted(len(names), "file"), dir)
			})
		},
	}
}

// problemsOf ends a command that found problems: they are its output.
func (a *app) problemsOf(problems policy.Problems) error {
	if a.json {
		for _, p := range problems {
			if err := a.print(p, nil); err != nil {
				return err
			}
		}
	} else {
		for _, p := range problems {
			fmt.Fprintln(a.Stderr, p)
		}
	}
	return &exit{code: exitFailure}
}

// loadPolicies reads a directory, or returns what holds without one.
func loadPolicies(dir string) (*policy.Policies, error) {
	if dir == "" {
		return policy.Builtin(), nil
	}
	info, err := os.Stat(dir)
	if err != nil || !info.IsDir() {
		return nil, noDirectory(dir)
	}
	p, err := policy.Load(policy.Dir(dir))
	var problems policy.Problems
	if errors.As(err, &problems) {
		return nil, below(dir, problems)
	}
	return p, err
}

func noDirectory(dir string) error {
	return airlock.Invalidf("DIR", "make one with `airlock policy init "+dir+"`", "%s is no directory", dir)
}

// below names the files of problems from where the command runs.
func below(dir string, problems policy.Problems) policy.Problems {
	for i := range problems {
		if problems[i].File != dir {
			problems[i].File = filepath.Join(dir, filepath.FromSlash(problems[i].File))
		}
	}
	return problems
}

// maxPolicyFile bounds a file that is read whole. What the policies themselves
// may have is less, and is checked where they are parsed.
const maxPolicyFile = 4 << 20

func readPolicyFile(path string, stdin io.Reader) ([]byte, error) {
	in := stdin
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			if errors.Is(err, os.ErrNotExist) {
				return nil, airlock.Invalidf("FILE", "check the path", "%s does not exist", path)
			}
			return nil, airlock.Invalidf("FILE", "check the path", "%v", err)
		}
		defer f.Close()
		in = f
	}
	text, err := io.ReadAll(io.LimitReader(in, maxPolicyFile+1))
	if err != nil {
		return nil, airlock.Invalidf("FILE", "check the path", "read %s: %v", path, err)
	}
	if len(text) > maxPolicyFile {
		return nil, airlock.Invalidf("FILE", "give a smaller one", "%s has more than %d bytes", path, maxPolicyFile)
	}
	return text, nil
}

func (a *app) policyValidate() *cobra.Command {
	return &cobra.Command{
		Use:   "validate DIR|FILE...",
		Short: "Say what is wrong with a directory or with files of policies",
		Long: `Validate reads policies as the server does, with the strict validator, and says
everything that is wrong: where, which policy, what, and what to do. It exits
with 1 if anything is wrong.`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			type valid struct {
				File     string `json:"file"`
				Policies int    `json:"policies"`
				Digest   string `json:"digest"`
			}
			var all policy.Problems
			var sets []valid
			for _, arg := range args {
				info, err := os.Stat(arg)
				var set *policy.Set
				var problems policy.Problems
				switch {
				case err != nil:
					return airlock.Invalidf("FILE", "check the path", "%s does not exist", arg)
				case info.IsDir():
					p, err := loadPolicies(arg)
					if errors.As(err, &problems) {
						all = append(all, problems...)
						continue
					} else if err != nil {
						return err
					}
					standard := p.For("")
					sets = append(sets, valid{filepath.Join(arg, standard.Name()), standard.Len(), standard.Digest()})
					for _, team := range p.Teams() {
						s := p.For(team)
						sets = append(sets, valid{filepath.Join(arg, s.Name()), s.Len(), s.Digest()})
					}
					continue
				}
				text, err := readPolicyFile(arg, nil)
				if err != nil {
					return err
				}
				set, err = policy.Parse(arg, text)
				if errors.As(err, &problems) {
					all = append(all, problems...)
					continue
				} else if err != nil {
					return err
				}
				sets = append(sets, valid{arg, set.Len(), set.Digest()})
			}
			if len(all) > 0 {
				return a.problemsOf(all)
			}
			for _, s := range sets {
				if err := a.print(s, func(w io.Writer) {
					fmt.Fprintf(w, "valid: %s, %s, sha256 %s\n", s.File, counted(s.Policies, "policy"), s.Digest)
				}); err != nil {
					return err
				}
			}
			return nil
		},
	}
}

func (a *app) policyTest() *cobra.Command {
	return &cobra.Command{
		Use:   "test DIR",
		Short: "Run the tests of a directory of policies",
		Long: `Test decides the calls of DIR/tests/*.yaml under the policies of DIR and
compares. It exits with 1 if a test fails or a policy is wrong.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			dir := args[0]
			p, err := loadPolicies(dir)
			var problems policy.Problems
			if errors.As(err, &problems) {
				return a.problemsOf(problems)
			} else if err != nil {
				return err
			}
			if len(p.Tests()) == 0 {
				return airlock.Invalidf("DIR", "write tests/NAME.yaml; `airlock policy init` shows an example", "%s has no tests", dir)
			}
			failed := 0
			for _, t := range p.Tests() {
				r := t.Run(p)
				r.File = filepath.Join(dir, filepath.FromSlash(r.File))
				if !r.Passed {
					failed++
				}
				if err := a.print(r, func(w io.Writer) {
					if r.Passed {
						fmt.Fprintf(w, "ok    %s\n", printable(r.Name))
						return
					}
					fmt.Fprintf(w, "FAIL  %s\n      %s:%d: %s\n", printable(r.Name), r.File, r.Line, r.Failure)
				}); err != nil {
					return err
				}
			}
			a.note("%s, %d failed", counted(len(p.Tests()), "test"), failed)
			if failed > 0 {
				return &exit{code: exitFailure}
			}
			return nil
		},
	}
}

func (a *app) policyExplain() *cobra.Command {
	var dir string
	cmd := &cobra.Command{
		Use:   "explain CALL.json|-",
		Short: "Decide one call and say why",
		Long: `Explain decides a call and says of every policy whether it applied, and what
kept the others away. The call is an object such as

  {"team": "research", "profile": "internet",
   "facts": {"sandbox": {"id": "i1", "template": "base"}},
   "call": {"principal": {"type": "Sandbox", "id": "i1"}, "action": "net:connect",
            "resource": {"type": "Host", "id": "example.com"},
            "context": {"ip": "93.184.216.34", "port": 443, "protocol": "tcp"}}}

It exits with 0 whatever the decision is.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			p, err := loadPolicies(dir)
			var problems policy.Problems
			if errors.As(err, &problems) {
				return a.problemsOf(problems)
			} else if err != nil {
				return err
			}
			text, err := readPolicyFile(args[0], a.Stdin)
			if err != nil {
				return err
			}
			q, err := policy.ParseQuestion(text)
			if err != nil {
				return err
			}
			effective, err := q.Under(p)
			if err != nil {
				return err
			}
			x := effective.Explain(q.Facts, q.Call)
			return a.print(x, func(w io.Writer) { explain(w, x) })
		},
	}
	cmd.Flags().StringVar(&dir, "dir", "", "directory of policies; default: the built-in profile "+policy.DefaultProfile)
	return cmd
}

func explain(out io.Writer, x policy.Explanation) {
	fmt.Fprintf(out, "%s: %s\n", x.Decision.Effect, x.Decision.Reason)
	for _, o := range x.Decision.Obligations {
		if o.Kind == policy.KindLimit {
			fmt.Fprintf(out, "  with at most %d rows\n", o.Limit)
		} else {
			fmt.Fprintf(out, "  with %s %s\n", o.Kind, o.Value)
		}
	}
	if len(x.Policies) == 0 {
		return
	}
	fmt.Fprintln(out)
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "POLICY\tSAYS\tAPPLIES\tWHY NOT")
	for _, f := range x.Policies {
		says, applies := "permit", "no"
		if f.Effect == policy.Deny {
			says = "forbid"
		}
		switch {
		case f.Applies:
			applies = "yes"
		case f.Error != "":
			applies = "error"
		}
		why := f.Why
		if f.Error != "" {
			why += ": " + f.Error
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", f.Policy, says, applies, why)
	}
	w.Flush()
}

func (a *app) policyDiff() *cobra.Command {
	return &cobra.Command{
		Use:   "diff OLD NEW",
		Short: "Say what a change of policies widens and narrows",
		Long: `Diff compares two directories or two files of policies. What follows from their
structure is exact; what is found by deciding calls made of the addresses,
names and numbers in both is marked as found by probes, and is not all there
may be. It exits with 0 whatever it finds.`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			before, after := map[string]*policy.Set{}, map[string]*policy.Set{}
			for i, into := range []map[string]*policy.Set{before, after} {
				err := ceilings(args[i], into)
				var problems policy.Problems
				if errors.As(err, &problems) {
					return a.problemsOf(problems)
				} else if err != nil {
					return err
				}
			}
			var names []string
			for _, m := range []map[string]*policy.Set{before, after} {
				for name := range m {
					if !slices.Contains(names, name) {
						names = append(names, name)
					}
				}
			}
			slices.Sort(names)
			for _, name := range names {
				// A team without a file of its own has what all have.
				was, is := before[name], after[name]
				if was == nil {
					was = before[""]
				}
				if is == nil {
					is = after[""]
				}
				d := policy.Compare(was, is)
				if err := a.print(struct {
					Team string `json:"team,omitempty"`
					policy.Difference
				}{name, d}, func(w io.Writer) {
					title := "every team without a file of its own"
					if name != "" {
						title = "team " + name
					} else if len(names) == 1 && filepath.Ext(args[0]) == ".cedar" {
						title = args[0] + " and " + args[1]
					}
					fmt.Fprintf(w, "%s: %s\n", title, d.Verdict)
					difference(w, d)
				}); err != nil {
					return err
				}
			}
			return nil
		},
	}
}

// ceilings reads a directory into the sets of its teams, with "" for the
// others, or a file into "".
func ceilings(path string, into map[string]*policy.Set) error {
	info, err := os.Stat(path)
	if err != nil {
		return airlock.Invalidf("DIR", "check the path", "%s does not exist", path)
	}
	if !info.IsDir() {
		text, err := readPolicyFile(path, nil)
		if err != nil {
			return err
		}
		into[""], err = policy.Parse(path, text)
		return err
	}
	p, err := loadPolicies(path)
	if err != nil {
		return err
	}
	into[""] = p.For("")
	for _, team := range p.Teams() {
		into[team] = p.For(team)
	}
	return nil
}

func difference(w io.Writer, d policy.Difference) {
	for _, c := range d.Policies {
		fmt.Fprintf(w, "  %-8s %s: %s\n", c.Change, c.Policy, c.Meaning)
	}
	for _, f := range d.Found {
		fmt.Fprintf(w, "  found by probes: %s was %s, would be %s, in %d of %d calls, such as\n", f.Action, f.Was, f.Would, f.Count, d.Probes)
		for _, e := range f.Examples {
			fmt.Fprintf(w, "    %s\n", strings.TrimSpace(e))
		}
	}
	if len(d.Policies) > 0 && len(d.Found) == 0 {
		fmt.Fprintf(w, "  found by probes: no difference in %d calls\n", d.Probes)
	}
}

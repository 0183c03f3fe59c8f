package cli

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"airlock.dev/airlock"
	"airlock.dev/airlock/client"
)

func (a *app) approvals() *cobra.Command {
	list := func(cmd *cobra.Command, _ []string) error {
		c, err := a.server()
		if err != nil {
			return err
		}
		all, err := c.Approvals(cmd.Context())
		if err != nil {
			return err
		}
		if a.json {
			for _, w := range all {
				if err := a.print(w, nil); err != nil {
					return err
				}
			}
			return nil
		}
		if len(all) == 0 {
			a.note("nothing waits for approval")
			return nil
		}
		w := tabwriter.NewWriter(a.Stdout, 0, 8, 2, ' ', 0)
		fmt.Fprintln(w, "ID\tLEFT\tTEAM\tSANDBOX\tWHAT\tFOR\tPOLICY")
		for _, h := range all {
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", h.ID, time.Until(h.Until).Round(time.Second), printable(h.Team), h.Sandbox, printable(attempted(h)), printable(strings.Join(h.Approvers, ",")), printable(strings.Join(h.Policies, ",")))
		}
		return w.Flush()
	}
	cmd := &cobra.Command{
		Use:     "approvals",
		Aliases: []string{"approval"},
		Short:   "List, approve and deny what waits for a person",
		Long: `Approvals lists what sandboxes try that a policy holds (@hold("NAME")), the
oldest first: to an approver what waits for them, to an operator all. Only keys
with the role approver decide, and never the key, or another key of the owner,
that made the sandbox. What nobody approves in time is denied. An approval is
for this one attempt.`,
		Example: `  export AIRLOCK_API_KEY=…   # of: airlock key create --role approver --team data-owners --owner alice
  airlock approvals
  airlock approvals approve 4qk7bz2m5vj3xw6a --reason "ticket 4711"`,
		Args: cobra.NoArgs,
		RunE: list,
	}
	cmd.AddCommand(&cobra.Command{Use: "list", Aliases: []string{"ls"}, Short: "List what waits", Args: cobra.NoArgs, RunE: list},
		a.decide("approve", "Let an attempt happen, once", true), a.decide("deny", "Deny an attempt now", false))
	return cmd
}

// attempted says what waits.
func attempted(h client.Approval) string {
	text := h.Action + " " + h.Resource
	if method, ok := h.Context["method"].(string); ok {
		text = fmt.Sprintf("%s %v://%s:%v%v", method, h.Context["scheme"], h.Resource, h.Context["port"], h.Context["path"])
	} else if port, ok := h.Context["port"]; ok {
		text += fmt.Sprintf(":%v", port)
	}
	return text
}

func (a *app) decide(use, short string, approve bool) *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use:   use + " ID",
		Short: short,
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if args[0] == "" {
				return airlock.Invalidf("ID", "give one that `airlock approvals` lists", "the id is empty")
			}
			c, err := a.server()
			if err != nil {
				return err
			}
			if err := c.Decide(cmd.Context(), args[0], approve, reason); err != nil {
				return err
			}
			return a.print(map[string]any{"id": args[0], "approved": approve}, func(io.Writer) {})
		},
	}
	cmd.Flags().StringVar(&reason, "reason", "", "why; it is recorded")
	return cmd
}

package cli

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"airlock.dev/airlock"
	"airlock.dev/airlock/client"
)

func (a *app) keys() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "key",
		Aliases: []string{"keys"},
		Short:   "Create and revoke API keys",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return cmd.Help()
		},
	}
	var team, role, name, owner string
	create := &cobra.Command{
		Use:   "create",
		Short: "Create a key and print its secret, which is not shown again",
		Long: `Create makes a key and prints its secret. Only a hash of it is kept: it is not
shown again. A team sees its own sandboxes only. The roles do not include each
other:

  client    runs sandboxes of its team
  operator  administers the installation
  approver  approves what a policy with @hold("NAME") names by its team or name; runs nothing
  auditor   reads the trail; runs nothing`,
		Example: `  export E2B_API_KEY=$(airlock key create --team research --name ci)`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := airlock.ParseRole(role)
			if err != nil {
				return airlock.Invalidf("--role", "use client, operator, approver or auditor", "--role: unknown role %q", role)
			}
			c, err := a.server()
			if err != nil {
				return err
			}
			key, err := c.CreateKey(cmd.Context(), client.KeyRequest{Team: team, Role: r, Name: name, Owner: owner})
			if err != nil {
				return err
			}
			return a.print(key, func(w io.Writer) { fmt.Fprintln(w, key.Secret) })
		},
	}
	create.Flags().StringVar(&team, "team", "default", "the team whose sandboxes it opens")
	create.Flags().StringVar(&role, "role", string(airlock.Client), "what it may do: client, operator, approver or auditor")
	create.Flags().StringVar(&name, "name", "", "a label for you; policies that hold requests may name approvers by it")
	create.Flags().StringVar(&owner, "owner", "", "the person whose key it is: nobody approves what their own sandboxes do")
	list := &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List the keys, without their secrets",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.server()
			if err != nil {
				return err
			}
			keys, err := c.ListKeys(cmd.Context())
			if err != nil {
				return err
			}
			if a.json {
				for _, key := range keys {
					if err := a.print(key, nil); err != nil {
						return err
					}
				}
				return nil
			}
			w := tabwriter.NewWriter(a.Stdout, 0, 8, 2, ' ', 0)
			fmt.Fprintln(w, "ID\tTEAM\tROLE\tCREATED\tNAME\tOWNER")
			for _, key := range keys {
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", key.ID, key.Team, key.Role, key.CreatedAt.Format("2006-01-02 15:04"), printable(key.Name), printable(key.Owner))
			}
			return w.Flush()
		},
	}
	revoke := &cobra.Command{
		Use:   "revoke ID",
		Short: "Revoke a key: it is refused from the next request on",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if strings.HasPrefix(args[0], "e2b_") {
				return airlock.Invalidf("ID", "give the id that `airlock key list` shows", "that is a key's secret, not its id")
			}
			c, err := a.server()
			if err != nil {
				return err
			}
			if err := c.RevokeKey(cmd.Context(), args[0]); err != nil {
				return err
			}
			return a.print(map[string]string{"revoked": args[0]}, func(io.Writer) {})
		},
	}
	cmd.AddCommand(create, list, revoke)
	return cmd
}

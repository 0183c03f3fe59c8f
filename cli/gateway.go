package cli

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"airlock.dev/airlock/client"
)

func (a *app) gateway() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "gateway",
		Short: "The certificate authority that sandboxes trust",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return cmd.Help()
		},
	}
	show := func(use, short, long, next string, do func(*client.Client, context.Context) (client.GatewayRoot, error)) *cobra.Command {
		return &cobra.Command{
			Use: use, Short: short, Long: long, Args: cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				c, err := a.server()
				if err != nil {
					return err
				}
				root, err := do(c, cmd.Context())
				if err != nil {
					return err
				}
				if next != "" {
					a.note("%s", next)
				}
				return a.print(root, func(w io.Writer) {
					for _, r := range root.Roots {
						fmt.Fprintf(w, "# %s, until %s\n%s", printable(r.Subject), r.Until.Format("2006-01-02"), r.PEM)
					}
				})
			},
		}
	}
	cmd.AddCommand(
		show("root", "Print the certificates that sandboxes trust", "", "", (*client.Client).GatewayRoot),
		show("rotate-root", "Replace the authority, in two steps", `Rotate-root makes a new authority beside the one in use. Then reload the server
(SIGHUP): sandboxes that are made from then on trust both, and the old one signs
as long as any from before runs. A start or reload after the last of those is
gone lets the new one sign, and forgets the old key.`, "there is a new authority: reload the server (SIGHUP), and once more when no sandbox from before runs", (*client.Client).RotateGatewayRoot),
	)
	return cmd
}

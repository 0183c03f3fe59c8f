package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"airlock.dev/airlock"
	"airlock.dev/airlock/keystore"
)

// keyFlags say where keys are. The environment has a reference to the root
// key, never the key: others can read it.
func keyFlags(flags interface {
	StringVar(p *string, name, value, usage string)
}, rootKey, keysDir *string) {
	flags.StringVar(rootKey, "root-key", os.Getenv("AIRLOCK_ROOT_KEY"), "where the root key is (AIRLOCK_ROOT_KEY): file:/PATH, systemd:NAME or a pkcs11: URI; default: root.key in --keys-dir, made at the first start")
	flags.StringVar(keysDir, "keys-dir", os.Getenv("AIRLOCK_KEYS_DIR"), "directory of the subject keys (AIRLOCK_KEYS_DIR), not inside --data-dir; default: its name with .keys behind it")
}

func (a *app) keystore() *cobra.Command {
	var rootKey, keysDir string
	cmd := &cobra.Command{
		Use:   "keystore",
		Short: "List and rotate the keys that the server keeps",
		Long: `Keystore is about the keys by which the server signs and encrypts; the keys
that open its API are those of ` + "`airlock key`" + `. A root key, outside the data
directory, wraps all of them. docs/KEYS.md says what each is for and how they
are backed up.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return cmd.Help()
		},
	}
	keyFlags(cmd.PersistentFlags(), &rootKey, &keysDir)
	open := func(ctx context.Context) (*keystore.Keystore, error) {
		// Opening would make keys where there are none.
		if _, err := keystore.List(a.dataDir); err != nil {
			return nil, err
		}
		return keystore.Open(ctx, keystore.Config{Root: rootKey, DataDir: a.dataDir, KeysDir: keysDir, TokenHelper: a.TokenHelper})
	}
	list := &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List the named keys, without what they are",
		Long: `List shows the named keys of --data-dir. It needs no root key, and the server
may be running.`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			l, err := keystore.List(a.dataDir)
			if err != nil {
				return err
			}
			if a.json {
				return a.print(l, nil)
			}
			fmt.Fprintf(a.Stdout, "installation  %s\nroot key      %s, since %s\n", l.Installation, printable(l.Root), l.Since.Format("2006-01-02 15:04"))
			w := tabwriter.NewWriter(a.Stdout, 0, 8, 2, ' ', 0)
			fmt.Fprintln(w, "PURPOSE\tNAME\tVERSION\tCREATED\tSTATE")
			for _, k := range l.Keys {
				fmt.Fprintf(w, "%s\t%s\t%d\t%s\t%s\n", k.Purpose, k.Name, k.Version, k.Created.Format("2006-01-02 15:04"), k.State)
			}
			return w.Flush()
		},
	}
	rotate := &cobra.Command{
		Use:   "rotate PURPOSE NAME",
		Short: "Make a new version of a named key; stop the server first",
		Long: `Rotate makes a new version of a key that ` + "`airlock keystore list`" + ` shows. From
the next start on it is the one that signs or seals; the versions before it stay,
to open what they sealed. Stop the server first.`,
		Example: `  airlock keystore rotate signing log`,
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			k, err := open(cmd.Context())
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, k.Close()) }()
			info, err := k.Rotate(cmd.Context(), args[0], args[1])
			if err != nil {
				return err
			}
			return a.print(info, func(w io.Writer) {
				fmt.Fprintf(w, "%s %s is at version %d\n", info.Purpose, info.Name, info.Version)
			})
		},
	}
	var to string
	rotateRoot := &cobra.Command{
		Use:   "rotate-root --to REFERENCE",
		Short: "Put every key under another root key; stop the server first",
		Long: `Rotate-root wraps all keys anew, so that the old root key opens nothing of them
any more. A file that --to names and that does not exist is made. Killed at any
moment, it leaves all keys to the old root key or all to the new one; run it
again then. Stop the server first, and start it with the new --root-key.

What was copied before, such as a backup of the data directory, still opens with
the old root key: keep that as long as such backups are to be restored, then
destroy it.`,
		Example: `  airlock keystore rotate-root --to file:/etc/airlock/root-2.key
  airlock keystore rotate-root --root-key file:/etc/airlock/root.key --to systemd:airlock-root`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if to == "" {
				return airlock.Invalidf("--to", "give file:/PATH, systemd:NAME or a pkcs11: URI", "--to is missing: it says where the new root key is")
			}
			k, err := open(cmd.Context())
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, k.Close()) }()
			if err := k.RotateRoot(cmd.Context(), to); err != nil {
				return err
			}
			l, err := keystore.List(a.dataDir)
			if err != nil {
				return err
			}
			return a.print(map[string]string{"root": l.Root}, func(w io.Writer) {
				fmt.Fprintf(w, "the root key is %s; start the server with --root-key %s\n", l.Root, l.Root)
			})
		},
	}
	rotateRoot.Flags().StringVar(&to, "to", "", "where the new root key is, as --root-key says it")
	cmd.AddCommand(list, rotate, rotateRoot)
	return cmd
}

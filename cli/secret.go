package cli

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"airlock.dev/airlock"
	"airlock.dev/airlock/client"
)

// secretMost is the most bytes of a value, with the end of its line.
const secretMost = 32<<10 + 2

func (a *app) secrets() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "secret",
		Aliases: []string{"secrets"},
		Short:   "Keep secrets that sandboxes use and never see",
		Long: `Secret keeps values such as API tokens. A sandbox gets a random placeholder in
place of each; the gateway puts the value into requests to the one place that was
declared for it, and refuses a request that has the placeholder anywhere else. What
comes back is searched for the value. docs/SECRETS.md says what that cannot do.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return cmd.Help()
		},
	}
	cmd.AddCommand(a.setSecret(), a.listSecrets(), a.rotateSecret(), a.removeSecret())
	return cmd
}

func (a *app) setSecret() *cobra.Command {
	var team, file, header, basic, query string
	var scope client.SecretScope
	cmd := &cobra.Command{
		Use:   "set NAME",
		Short: "Make or replace a secret; its value comes from standard input",
		Long: `Set makes a secret, or replaces it with all that was said of it. Its value is one
line of at most 32 KiB, read from standard input or a file and never an argument:
arguments are seen by others. A terminal is asked for it without echo.

Where it may be sent is exact, and always https: one host, one port, methods, and a
path in which {name} stands for one segment and {rest...} at the end for all that
follow. In one of --header, --basic and --query, {} stands for the value.`,
		Example: `  airlock secret set github --host api.github.com --method GET,POST --path '/repos/{owner}/{rest...}' \
    --header 'Authorization: Bearer {}' < token
  airlock secret set git --host github.com --method GET,POST --path '/acme/{repo}/{rest...}' --basic x-access-token:{}
  airlock secret set weather --host api.weather.example --method GET --path /v1/now --query appid --from-file key`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := secretScope(&scope, header, basic, query); err != nil {
				return err
			}
			value, err := a.secretValue(args[0], file)
			if err != nil {
				return err
			}
			c, err := a.server()
			if err != nil {
				return err
			}
			secret, err := c.SetSecret(cmd.Context(), team, args[0], scope, value)
			if err != nil {
				return secretFlag(err)
			}
			return a.printSecret(secret)
		},
	}
	flags := cmd.Flags()
	a.secretFlags(cmd, &team, &file)
	flags.StringVar(&scope.Host, "host", "", "the host that it may be sent to, as api.example.com")
	flags.Uint16Var(&scope.Port, "port", 443, "the port there")
	flags.StringSliceVar(&scope.Methods, "method", nil, "with these methods, as GET,POST")
	flags.StringVar(&scope.Path, "path", "", "with this path, as '/v1/{rest...}'")
	flags.StringVar(&header, "header", "", "in this header, as 'Authorization: Bearer {}'")
	flags.StringVar(&basic, "basic", "", "as Basic authentication: USER:{} or {}:PASSWORD")
	flags.StringVar(&query, "query", "", "in this parameter of the query")
	flags.BoolVar(&scope.Upgrade, "upgrade", false, "WebSockets may be opened with it; what is said in them is not searched")
	return cmd
}

func (a *app) secretFlags(cmd *cobra.Command, team, file *string) {
	cmd.Flags().StringVar(team, "team", "default", "the team whose sandboxes may use it")
	cmd.Flags().StringVar(file, "from-file", "", "read the value from this file")
}

func (a *app) printSecret(s client.Secret) error {
	return a.print(s, func(w io.Writer) {
		fmt.Fprintf(w, "%s, version %d: %s %s in %s\n", s.Name, s.Version, strings.Join(s.Methods, ","), s.URL(), printable(s.Place.String()))
	})
}

func (a *app) listSecrets() *cobra.Command {
	var team string
	cmd := &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List the secrets, without their values",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.server()
			if err != nil {
				return err
			}
			list, err := c.ListSecrets(cmd.Context(), team)
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
			w := tabwriter.NewWriter(a.Stdout, 0, 8, 2, ' ', 0)
			fmt.Fprintln(w, "TEAM\tNAME\tVERSION\tMETHODS\tTO\tIN\tUPDATED")
			for _, s := range list {
				fmt.Fprintf(w, "%s\t%s\t%d\t%s\t%s\t%s\t%s\n", s.Team, s.Name, s.Version, strings.Join(s.Methods, ","), printable(s.URL()), printable(s.Place.String()), s.UpdatedAt.Format("2006-01-02 15:04"))
			}
			return w.Flush()
		},
	}
	cmd.Flags().StringVar(&team, "team", "", "of this team only")
	return cmd
}

func (a *app) rotateSecret() *cobra.Command {
	var team, file string
	cmd := &cobra.Command{
		Use:   "rotate NAME",
		Short: "Give a secret another value, from standard input",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			value, err := a.secretValue(args[0], file)
			if err != nil {
				return err
			}
			c, err := a.server()
			if err != nil {
				return err
			}
			secret, err := c.RotateSecret(cmd.Context(), team, args[0], value)
			if err != nil {
				return secretFlag(err)
			}
			return a.printSecret(secret)
		},
	}
	a.secretFlags(cmd, &team, &file)
	return cmd
}

func (a *app) removeSecret() *cobra.Command {
	var team string
	cmd := &cobra.Command{
		Use:     "rm NAME",
		Aliases: []string{"remove", "delete"},
		Short:   "Forget a secret",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.server()
			if err != nil {
				return err
			}
			if err := c.RemoveSecret(cmd.Context(), team, args[0]); err != nil {
				return secretFlag(err)
			}
			return a.print(map[string]string{"removed": args[0]}, func(io.Writer) {})
		},
	}
	cmd.Flags().StringVar(&team, "team", "default", "the team that it belongs to")
	return cmd
}

// secretScope completes a scope from the flags. What the server checks anyway
// is left to it.
func secretScope(scope *client.SecretScope, header, basic, query string) error {
	const place = "give one of --header, --basic and --query"
	switch {
	case scope.Host == "":
		return airlock.Invalidf("--host", "give the host that it may be sent to, as --host api.example.com", "--host is missing")
	case len(scope.Methods) == 0:
		return airlock.Invalidf("--method", "give the methods, as --method GET,POST", "--method is missing")
	case scope.Path == "":
		return airlock.Invalidf("--path", "give the path; '/{rest...}' is every path", "--path is missing")
	case header == "" && basic == "" && query == "":
		return airlock.Invalidf("", place+", as --header 'Authorization: Bearer {}'", "nothing says where in the request the value goes")
	case header != "" && basic != "" || header != "" && query != "" || basic != "" && query != "":
		return airlock.Invalidf("", place, "the value goes to one place only")
	}
	if u, err := url.Parse(scope.Host); err == nil && u.Host != "" {
		return airlock.Invalidf("--host", "give --host "+u.Hostname()+", and the path with --path", "--host is a URL")
	}
	for i, m := range scope.Methods {
		scope.Methods[i] = strings.ToUpper(m)
	}
	switch {
	case header != "":
		name, value, found := strings.Cut(header, ":")
		prefix, whole := strings.CutSuffix(strings.TrimLeft(value, " "), "{}")
		if !found || !whole || strings.Contains(prefix, "{}") {
			return airlock.Invalidf("--header", "write it as 'Authorization: Bearer {}' or 'X-Api-Key: {}'", "--header: %.80q does not end with {}, for the value", header)
		}
		scope.Place = client.SecretPlace{Header: name, Prefix: prefix}
	case basic != "":
		user, password, found := strings.Cut(basic, ":")
		switch {
		case found && password == "{}" && user != "{}":
			scope.Place = client.SecretPlace{Basic: "password", Other: user}
		case user == "{}" && password != "{}":
			scope.Place = client.SecretPlace{Basic: "user", Other: password}
		default:
			return airlock.Invalidf("--basic", "write it as USER:{} or {}:PASSWORD", "--basic: it is not clear which half of %.80q is the value", basic)
		}
	default:
		scope.Place = client.SecretPlace{Query: query}
	}
	return nil
}

// secretFlag names the flag where a server names a field.
func secretFlag(err error) error {
	flags := map[string]string{
		"host": "--host", "port": "--port", "methods": "--method", "path": "--path", "header": "--header", "prefix": "--header",
		"basic": "--basic", "other": "--basic", "team": "--team", "name": "NAME",
	}
	if e, ok := errors.AsType[*airlock.Error](err); ok && flags[e.Field] != "" {
		named := *e
		named.Field = flags[e.Field]
		return &named
	}
	return err
}

// secretValue reads a secret's value, of one line.
func (a *app) secretValue(name, file string) (string, error) {
	in, what := a.Stdin, "standard input"
	if file != "" {
		f, err := os.Open(file)
		if errors.Is(err, fs.ErrNotExist) {
			return "", airlock.Invalidf("--from-file", "check the path", "--from-file: %s does not exist", file)
		} else if err != nil {
			return "", fmt.Errorf("open the value's file: %w", err)
		}
		defer f.Close()
		in, what = f, file
	} else if tty, ok := in.(*os.File); ok && term.IsTerminal(int(tty.Fd())) {
		fmt.Fprintf(a.Stderr, "value of %s: ", name)
		value, err := term.ReadPassword(int(tty.Fd()))
		fmt.Fprintln(a.Stderr)
		if err != nil {
			return "", fmt.Errorf("read the value: %w", err)
		}
		in, what = strings.NewReader(string(value)), "what was typed"
	}
	text, err := io.ReadAll(io.LimitReader(in, secretMost+1))
	if err != nil {
		return "", fmt.Errorf("read the value: %w", err)
	}
	value := strings.TrimSuffix(strings.TrimSuffix(string(text), "\n"), "\r")
	hint := "give the value as one line, as with: printf %s \"$TOKEN\" | airlock secret set …"
	switch {
	case len(text) > secretMost:
		return "", airlock.Invalidf("value", "give at most 32 KiB", "%s is too long for a secret", what)
	case value == "":
		return "", airlock.Invalidf("value", hint, "%s is empty", what)
	case strings.ContainsAny(value, "\r\n"):
		return "", airlock.Invalidf("value", hint, "%s has more than one line", what)
	}
	return value, nil
}

package cli

import (
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"unicode"

	"github.com/spf13/cobra"

	"airlock.dev/airlock"
	"airlock.dev/airlock/policy"
)

// netFlags say what a sandbox may reach.
type netFlags struct {
	net     string
	secrets []string
}

func (f *netFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.net, "net", "", "what it may reach, of what the team may: the `PROFILE` offline, packages (registries, to read) or internet, or a file NAME.cedar of policies (default internet)")
	cmd.Flags().StringArrayVar(&f.secrets, "secret", nil, "`NAME[=VARIABLE]` of a secret that it may use: the variable (NAME in capitals) has a placeholder, which is taken out where the secret belongs; may be repeated")
}

// named names a flag where a server names a field of a create.
func (f *netFlags) named(err error) error {
	e, ok := errors.AsType[*airlock.Error](err)
	if !ok {
		return err
	}
	named := *e
	switch e.Field {
	case "secrets":
		named.Field = "--secret"
	case "policy":
		named.Field = "--net"
		lines := strings.Split(e.Message, "\n")
		for i, line := range lines {
			if rest, found := strings.CutPrefix(line, "policy:"); found {
				lines[i] = f.net + ":" + rest
			}
		}
		named.Message = strings.Join(lines, "\n")
	}
	return &named
}

// wanted returns the secrets of --secret by their variables.
func (f *netFlags) wanted() (map[string]string, error) {
	if len(f.secrets) == 0 {
		return nil, nil
	}
	all := map[string]string{}
	for _, s := range f.secrets {
		name, variable, given := strings.Cut(s, "=")
		if !given {
			variable = strings.Map(func(r rune) rune {
				if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' {
					return unicode.ToUpper(r)
				}
				return '_'
			}, name)
		}
		if name == "" || variable == "" || all[variable] != "" {
			return nil, airlock.Invalidf("--secret", "give NAME or NAME=VARIABLE, each variable once", "--secret: %.60q is no secret, or its variable has one", s)
		}
		all[variable] = name
	}
	return all, nil
}

// maxNetPolicy bounds a file of policies; the server has the same bound.
const maxNetPolicy = 64 << 10

// asks returns the profile or the policies that --net names.
func (f *netFlags) asks() (profile, text string, err error) {
	if f.net == "" || slices.Contains(policy.ProfileNames(), f.net) {
		return f.net, "", nil
	}
	if !strings.HasSuffix(f.net, ".cedar") {
		return "", "", airlock.Invalidf("--net", "use "+strings.Join(policy.ProfileNames(), ", ")+", or a file whose name ends in .cedar", "--net: there is no profile %.60q", f.net)
	}
	r, err := os.Open(f.net)
	if err != nil {
		return "", "", notReadable("--net", f.net, err)
	}
	defer r.Close()
	b, err := io.ReadAll(io.LimitReader(r, maxNetPolicy+1))
	if err != nil {
		return "", "", notReadable("--net", f.net, err)
	}
	if len(b) > maxNetPolicy {
		return "", "", airlock.Invalidf("--net", "use at most 64 KiB", "--net: %s is larger than that", f.net)
	}
	return "", string(b), nil
}

package cli

import (
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"airlock.dev/airlock"
	"airlock.dev/airlock/policy"
)

// netFlags say what a sandbox may reach.
type netFlags struct{ net string }

func (f *netFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.net, "net", "", "what it may reach, of what the team may: the `PROFILE` offline, packages (registries, to read) or internet, or a file NAME.cedar of policies (default internet)")
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

package policy

import (
	"embed"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"github.com/cedar-policy/cedar-go"

	"airlock.dev/airlock"
)

//go:embed profiles/*.cedar
var profileFiles embed.FS

// DefaultProfile is what holds where nobody names a profile: for a request
// without one, and as the ceiling of an installation without policies.
const DefaultProfile = "internet"

// ProfileNames are the profiles, from the narrowest to the widest.
func ProfileNames() []string { return []string{"offline", "packages", "internet"} }

var profiles = sync.OnceValue(func() map[string]*Set {
	sets := map[string]*Set{}
	for _, name := range ProfileNames() {
		text, err := profileFiles.ReadFile("profiles/" + name + ".cedar")
		if err == nil {
			sets[name], err = Parse("profile "+name, text)
		}
		if err != nil {
			panic(err) // part of this program: the first test finds it
		}
	}
	return sets
})

// Profile returns a built-in set of policies; an empty name is DefaultProfile.
func Profile(name string) (*Set, error) {
	if name == "" {
		name = DefaultProfile
	}
	if s := profiles()[name]; s != nil {
		return s, nil
	}
	return nil, airlock.Invalidf("profile", "use "+strings.Join(ProfileNames(), ", "), "there is no profile %s", shown(name))
}

// ProfileText returns the file of a profile, with its comments.
func ProfileText(name string) (string, error) {
	if _, err := Profile(name); err != nil {
		return "", err
	}
	if name == "" {
		name = DefaultProfile
	}
	text, err := profileFiles.ReadFile("profiles/" + name + ".cedar")
	return string(text), err
}

// maxNetworkEntries bounds each list of a Network.
const maxNetworkEntries = 1000

// maxRequest bounds a client's own policies, in bytes.
const maxRequest = 64 << 10

// maxPatterns bounds the patterns of like in a client's own policies, in bytes
// together. To match one can take as many steps as it has bytes times those of
// the text, which is the sandbox's: 64 KiB of them took half a second for each
// request, of the server that decides for everybody.
const maxPatterns = 4 << 10

// FromRequest returns the policies of what a client asks for: a profile (empty
// is DefaultProfile), policies of its own in Cedar's language (they may be
// empty; if they are not, they are beside the profile offline unless another
// one is named), and what its Network adds to that and takes away. As with
// E2B, what allowOut names wins over denyOut, and no internet is the same as
// denying every address. Names reach public addresses only; a private address
// is named itself. Beside a ceiling all this can only narrow. The error is
// Invalid and names the field.
//
// registries are those of this installation; the profile packages leads there too.
func FromRequest(profile, text string, n airlock.Network, registries []Registry) (*Set, error) {
	if text != "" && profile == "" {
		profile = "offline"
	}
	base, err := Profile(profile)
	if err != nil {
		return nil, err
	}
	if profile == "packages" && len(registries) > 0 {
		if base, err = withRegistries(base, registries); err != nil {
			return nil, err
		}
	}
	if text != "" {
		own, err := parseRequest(text)
		if err != nil {
			return nil, err
		}
		if base, err = join("request", base, own); err != nil {
			return nil, airlock.Invalidf("policy", "give policies other ids than those of the profile", "policy: %s", err)
		}
	}
	w := wishes{denyAll: n.AllowInternet != nil && !*n.AllowInternet}
	if err := w.read(n); err != nil {
		return nil, err
	}
	wanted := w.policies(n.AllowPublicTraffic != nil && !*n.AllowPublicTraffic)
	if wanted == "" {
		return base, nil
	}
	asked, err := Parse("request", []byte(wanted))
	if err != nil {
		return nil, fmt.Errorf("policies of a request's network: %w", err)
	}
	return join("request", base, asked)
}

// Registry is where packages come from, by the settings of this installation.
type Registry struct {
	Host string
	Port uint16
}

// withRegistries adds policies for registries to a profile. They permit any
// address, since they only ask: a private one the operator's policies name.
func withRegistries(base *Set, registries []Registry) (*Set, error) {
	var names, places []string
	for _, r := range registries {
		name, err := HostName(r.Host)
		if err != nil {
			return nil, fmt.Errorf("a registry of this installation: %w", err)
		}
		names = append(names, quoted(name))
		places = append(places, fmt.Sprintf("(resource.name == %s && context.port == %d)", quoted(name), r.Port))
	}
	text := fmt.Sprintf("@id(\"resolve-own-registries\")\npermit (principal, action == Action::\"dns:resolve\", resource)\nwhen { [%s].contains(resource.name) };\n\n"+
		"@id(\"read-from-own-registries\")\npermit (principal, action == Action::\"http:request\", resource)\nwhen { (context.method == \"GET\" || context.method == \"HEAD\") && (%s) };\n", strings.Join(names, ", "), strings.Join(places, " || "))
	own, err := Parse("registries", []byte(text))
	if err != nil {
		return nil, fmt.Errorf("policies of this installation's registries: %w", err)
	}
	return join("profile packages", base, own)
}

// parseRequest reads a client's own policies. What would widen, or is for the
// operator to say, is refused: TLS that nobody looks into, and secrets.
func parseRequest(text string) (*Set, error) {
	if len(text) > maxRequest {
		return nil, airlock.Invalidf("policy", fmt.Sprintf("use at most %d bytes", maxRequest), "policy has %d bytes", len(text))
	}
	own, err := Parse("policy", []byte(text))
	if err != nil {
		return nil, airlock.Invalidf("policy", "check it with `airlock policy validate`", "%s", err)
	}
	patterns := 0
	for _, p := range own.policies {
		patterns += p.patternBytes
		for _, o := range p.obligations {
			if o.Kind == KindPass || o.Kind == KindInject {
				return nil, airlock.Invalidf("policy", "leave it out: it is for the operator's policies", "policy %s has @%s", p.id, o.Kind)
			}
		}
	}
	if patterns > maxPatterns {
		return nil, airlock.Invalidf("policy", fmt.Sprintf("use at most %d", maxPatterns), "the patterns of its conditions with like have %d bytes together", patterns)
	}
	return own, nil
}

// wishes is a Network, understood.
type wishes struct {
	denyAll       bool
	allowAll      bool // all IPv4 addresses, or all IPv6 ones
	deny, allow   []netip.Prefix
	names, suffix []string // allowed: exact names; ends of names, with the dot
}

func (w *wishes) read(n airlock.Network) error {
	for _, list := range []struct {
		field   string
		entries []string
	}{{"network.denyOut", n.DenyOut}, {"network.allowOut", n.AllowOut}} {
		if len(list.entries) > maxNetworkEntries {
			return airlock.Invalidf(list.field, fmt.Sprintf("use at most %d", maxNetworkEntries), "%s has %d entries", list.field, len(list.entries))
		}
		for i, entry := range list.entries {
			prefix, isAddress := network(entry)
			switch {
			case isAddress && list.field == "network.denyOut":
				if prefix.Bits() == 0 {
					w.denyAll = true // clients write 0.0.0.0/0 for everything
				}
				w.deny = append(w.deny, prefix)
				continue
			case isAddress:
				w.allowAll = w.allowAll || prefix.Bits() == 0
				w.allow = append(w.allow, prefix)
				continue
			case list.field == "network.denyOut":
				return airlock.Invalidf(list.field, "give IP addresses and CIDR networks; domains can only be allowed", "%s[%d] is %s", list.field, i, shown(entry))
			}
			bare, wild := strings.CutPrefix(entry, "*.")
			name, err := HostName(bare)
			if err != nil {
				return airlock.Invalidf(list.field, "give IP addresses, CIDR networks and domains such as *.example.com", "%s[%d] is %s", list.field, i, shown(entry))
			}
			if wild {
				w.suffix = append(w.suffix, "."+name)
			} else {
				w.names = append(w.names, name)
			}
		}
	}
	return nil
}

// network reads an address or a CIDR network. An IPv4 one that hides in an
// IPv6 one is none.
func network(s string) (netip.Prefix, bool) {
	if addr, err := netip.ParseAddr(s); err == nil && addr.Zone() == "" {
		addr = addr.Unmap()
		return netip.PrefixFrom(addr, addr.BitLen()), true
	}
	p, err := netip.ParsePrefix(s)
	if err != nil || p.Addr().Is4In6() {
		return netip.Prefix{}, false
	}
	return p.Masked(), true
}

// publicOnly is the end of a policy for public addresses, as in the profiles.
const publicOnly = `when {
  context.ip.isIpv4() || context.ip.isInRange(ip("2000::/3"))
}
unless {
` + privateRanges + `
}`

const privateRanges = `  context.ip.isInRange(ip("0.0.0.0/8")) ||      // this host
  context.ip.isInRange(ip("10.0.0.0/8")) ||     // private
  context.ip.isInRange(ip("100.64.0.0/10")) ||  // shared by carriers
  context.ip.isInRange(ip("127.0.0.0/8")) ||    // loopback
  context.ip.isInRange(ip("169.254.0.0/16")) || // link-local, metadata of clouds
  context.ip.isInRange(ip("172.16.0.0/12")) ||  // private
  context.ip.isInRange(ip("192.0.0.0/24")) ||   // protocols
  context.ip.isInRange(ip("192.168.0.0/16")) || // private
  context.ip.isInRange(ip("198.18.0.0/15")) ||  // measurements
  context.ip.isInRange(ip("224.0.0.0/3")) ||    // multicast, reserved, broadcast
  context.ip.isInRange(ip("2001::/23")) ||      // protocols, Teredo
  context.ip.isInRange(ip("2002::/16"))         // 6to4: carries an IPv4 address`

// policies writes the wishes in Cedar's language. Everything that comes from
// the client has been read into addresses and host names; as strings they are
// quoted all the same.
func (w *wishes) policies(privatePorts bool) string {
	var b strings.Builder
	byName, byAddress := w.nameCondition(), inRanges(w.allow)
	crossing := "(principal, action in [Action::\"net:connect\", Action::\"http:request\"], resource)\n"
	if byName != "" {
		fmt.Fprintf(&b, "@id(\"network.allow-names-resolve\")\npermit (principal, action == Action::\"dns:resolve\", resource)\nwhen { %s };\n\n", byName)
		fmt.Fprintf(&b, "@id(\"network.allow-names\")\npermit %swhen { %s }\n%s;\n\n", crossing, byName, publicOnly)
	}
	if byAddress != "" {
		fmt.Fprintf(&b, "@id(\"network.allow-addresses\")\npermit %swhen { %s };\n\n", crossing, byAddress)
	}
	if w.denyAll || len(w.deny) > 0 {
		var unless strings.Builder
		if byAddress != "" {
			fmt.Fprintf(&unless, "\nunless { %s }", byAddress)
		}
		if byName != "" {
			fmt.Fprintf(&unless, "\nunless { (%s) && (context.ip.isIpv4() || context.ip.isInRange(ip(\"2000::/3\"))) && !(\n%s) }", byName, privateRanges+"\n")
		}
		when := ""
		if !w.denyAll {
			when = "\nwhen { " + inRanges(w.deny) + " }"
		}
		fmt.Fprintf(&b, "@id(\"network.deny\")\n@reason(%s)\nforbid %s%s%s;\n\n", quoted("the client's own network.denyOut or allowInternet denies it: add it to network.allowOut when you make the sandbox"), strings.TrimSuffix(crossing, "\n"), when, unless.String())
		// Where some names or no addresses are allowed, only those names are
		// looked up; where all addresses are, there is nothing to hide.
		if w.denyAll && !w.allowAll {
			unless := ""
			if byName != "" {
				unless = "\nunless { " + byName + " }"
			}
			fmt.Fprintf(&b, "@id(\"network.deny-names\")\n@reason(%s)\nforbid (principal, action == Action::\"dns:resolve\", resource)%s;\n\n", quoted("the client's own network.denyOut or allowInternet denies it: add the name to network.allowOut when you make the sandbox"), unless)
		}
	}
	if privatePorts {
		fmt.Fprintf(&b, "@id(\"network.private-ports\")\n@reason(%s)\nforbid (principal, action == Action::\"port:serve\", resource)\nwhen { context.caller == \"public\" };\n\n", quoted("the client's own network.allowPublicTraffic is false: send the sandbox's traffic token"))
	}
	return b.String()
}

func (w *wishes) nameCondition() string {
	var or []string
	if len(w.names) > 0 {
		list := make([]string, len(w.names))
		for i, n := range w.names {
			list[i] = quoted(n)
		}
		slices.Sort(list)
		or = append(or, "["+strings.Join(slices.Compact(list), ", ")+"].contains(resource.name)")
	}
	for _, s := range w.suffix {
		or = append(or, "resource.name like "+likeSuffix(s))
	}
	return strings.Join(or, " || ")
}

func inRanges(list []netip.Prefix) string {
	or := make([]string, len(list))
	for i, p := range list {
		text := p.String()
		if p.IsSingleIP() {
			text = p.Addr().String()
		}
		or[i] = "context.ip.isInRange(ip(" + quoted(text) + "))"
	}
	return strings.Join(or, " || ")
}

// quoted returns a string as Cedar writes it.
func quoted(s string) string { return string(cedar.String(s).MarshalCedar()) }

// likeSuffix returns the pattern of everything that ends with s.
func likeSuffix(s string) string {
	return string(cedar.NewPattern(cedar.Wildcard{}, s).MarshalCedar())
}

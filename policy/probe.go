package policy

import (
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// lastAddress is the highest address of a network.
func lastAddress(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// axis is one thing that probes vary, with the values that it takes.
type axis struct {
	set    func(*Facts, *Call, any)
	values []any
}

// ordinary are the values of a context where a policy asks for no others.
var ordinary = map[string]any{
	"method": "GET", "path": "/", "scheme": "https", "protocol": "tcp", "port": int64(443), "ip": "198.51.100.7",
	"caller": "public", "program": "sh", "profile": DefaultProfile, "template": "probe", "host": "probe.example",
	"location": "header", "user": "probe", "to": "/probe", "time": "2026-01-01T00:00:00Z",
}

// calls are the calls of one action with one type of principal and resource:
// all combinations of the values that the policy looks at, each with one value
// more that it does not name, or a part of them spread evenly.
func (l literals) calls(id string, a *action, principal, resource string) iter.Seq2[Facts, Call] {
	axes := l.axes(a, principal, resource)
	total := 1
	for _, x := range axes {
		total = min(total*len(x.values), 1<<30)
	}
	step := 1
	if total > maxCaseProbes {
		step = total/maxCaseProbes | 1
	}
	return func(yield func(Facts, Call) bool) {
		for n := 0; n < total; n += step {
			f := Facts{Team: "probe", Caller: Caller{ID: "probe", Role: "client"}, Sandbox: Sandbox{ID: "probe", Template: "probe"},
				App: App{ID: "probe", Version: "probe"}, Execution: Execution{ID: "probe"}}
			if principal == "Agent" {
				f.Caller.Kind = "agent"
			}
			c := Call{Action: id, Resource: Entity{Type: resource, ID: ordinaryID(resource)}, Context: Context{}}
			for name, attr := range a.context {
				if attr.optional {
					continue
				}
				c.Context[name] = ordinaryValue(name, attr.kind)
			}
			rest := n
			for _, x := range axes {
				x.set(&f, &c, x.values[rest%len(x.values)])
				rest /= len(x.values)
			}
			c.Principal = known(f, principal)
			if e := known(f, resource); e.Type != "" {
				c.Resource = e
			}
			if _, err := newQuery(f, c); err != nil {
				continue // a literal that no such call can have
			}
			if !yield(f, c) {
				return
			}
		}
	}
}

func ordinaryValue(name string, kind valueKind) any {
	if v, ok := ordinary[name]; ok {
		return v
	}
	switch kind {
	case aLong:
		return int64(1)
	case aBool:
		return true
	case aStrings:
		return []string{}
	case anIP:
		return ordinary["ip"]
	case aTime:
		return ordinary["time"]
	}
	return "probe"
}

func ordinaryID(typ string) string {
	switch typ {
	case "Host":
		return "probe.example"
	case "Port":
		return "8080"
	case "Path":
		return "/probe"
	}
	if n := len(dataNames[typ]); n > 0 {
		return strings.Repeat("probe/", n-1) + "probe"
	}
	return "probe"
}

// known is the entity of a type that facts describe, or none.
func known(f Facts, typ string) Entity {
	switch typ {
	case "Team":
		return Entity{typ, f.Team}
	case "User", "Agent":
		return Entity{typ, f.Caller.ID}
	case "Sandbox":
		return Entity{typ, f.Sandbox.ID}
	case "App":
		return Entity{typ, f.App.ID}
	case "Execution":
		return Entity{typ, f.Execution.ID}
	}
	return Entity{}
}

// axes turns what a policy looks at into what probes vary.
func (l literals) axes(a *action, principal, resource string) []axis {
	var axes []axis
	add := func(values []any, other any, set func(*Facts, *Call, any)) {
		if other != nil && !slices.Contains(values, other) {
			values = append(slices.Clone(values), other)
		}
		if len(values) > 0 {
			axes = append(axes, axis{set, values})
		}
	}
	ids := make([]any, 0, 8)
	for _, thing := range slices.Sorted(maps.Keys(l)) {
		values := l[thing]
		name := thing[strings.LastIndexByte(thing, '.')+1:]
		switch {
		case strings.HasPrefix(thing, "context."):
			attr, ok := a.context[name]
			if !ok {
				continue
			}
			other := ordinaryValue(name, attr.kind)
			if attr.kind == aString && slices.Contains(values, other) {
				other = "probe" // one value that the policy does not name
			}
			if attr.kind == aBool {
				values = []any{true, false}
			}
			add(values, other, func(_ *Facts, c *Call, v any) { c.Context[name] = v })
		case strings.HasPrefix(thing, "tag:"):
			key := strings.TrimPrefix(thing, "tag:")
			add(values, "probe", func(f *Facts, _ *Call, v any) {
				if s, ok := v.(string); ok {
					f.Sandbox.Metadata = map[string]string{key: s}
				}
			})
		case name == "role":
			add(values, "client", func(f *Facts, _ *Call, v any) { f.Caller.Role, _ = v.(string) })
		case name == "template":
			add(values, "probe", func(f *Facts, _ *Call, v any) { f.Sandbox.Template, _ = v.(string) })
		case name == "version":
			add(values, "probe", func(f *Facts, _ *Call, v any) { f.App.Version, _ = v.(string) })
		case thing == "resource.name" && dataNames[resource] == nil, thing == "resource.path", thing == "resource.number":
			for _, v := range values {
				ids = append(ids, fmt.Sprint(v))
			}
		case strings.HasPrefix(thing, "resource.") && dataNames[resource] != nil:
			for i, part := range dataNames[resource] {
				if string(part) != name {
					continue
				}
				add(values, "probe", func(_ *Facts, c *Call, v any) {
					parts := strings.Split(c.Resource.ID, "/")
					if s, ok := v.(string); ok && i < len(parts) {
						parts[i] = s
					}
					c.Resource.ID = strings.Join(parts, "/")
				})
			}
		case thing == "Team":
			// The caller's team and the owner's are the same, and not.
			add(values, "probe", func(f *Facts, _ *Call, v any) { f.Team, _ = v.(string) })
			add(values, "", func(f *Facts, _ *Call, v any) { f.Caller.Team, _ = v.(string) })
		case thing == "User", thing == "Agent":
			add(values, "probe", func(f *Facts, _ *Call, v any) { f.Caller.ID, _ = v.(string) })
		case thing == "Sandbox":
			add(values, "probe", func(f *Facts, _ *Call, v any) { f.Sandbox.ID, _ = v.(string) })
		case thing == "App":
			add(values, "probe", func(f *Facts, _ *Call, v any) { f.App.ID, _ = v.(string) })
		case thing == "Execution":
			add(values, "probe", func(f *Facts, _ *Call, v any) { f.Execution.ID, _ = v.(string) })
		case thing == resource:
			ids = append(ids, values...)
		case thing == "Database" || thing == "Table":
			// What is in it, at the depth of the resource.
			for _, v := range values {
				id := fmt.Sprint(v)
				for n := strings.Count(id, "/") + 1; n < len(dataNames[resource]); n++ {
					id += "/probe"
				}
				ids = append(ids, id)
			}
		}
	}
	if len(ids) > 0 {
		// First, so that parts of ids are put into what this sets.
		axes = append([]axis{{func(_ *Facts, c *Call, v any) { c.Resource.ID, _ = v.(string) }, append(ids, ordinaryID(resource))}}, axes...)
	}
	// Who acts on what is another team's is asked always.
	if _, callers := map[string]bool{"User": true, "Agent": true}[principal]; callers && l["Team"] == nil {
		add([]any{"", "other"}, nil, func(f *Facts, _ *Call, v any) { f.Caller.Team, _ = v.(string) })
	}
	return axes
}

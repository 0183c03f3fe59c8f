package api_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestSetNetwork(t *testing.T) {
	w := newWorld(t)
	id, _ := w.create(`{"templateID":"base","network":{"allowPublicTraffic":true,"denyOut":["10.0.0.0/8"],"rules":{"A.example":[{"transform":{"headers":{"x-key":"value-of-it"}}}]}}}`)
	network := func() string {
		t.Helper()
		var info struct {
			AllowInternet any `json:"allowInternetAccess"`
			Network       any
		}
		r := w.as(w.client, "GET", "/sandboxes/"+id, "")
		if strings.Contains(r.body, "value-of-it") {
			t.Errorf("the value is told: %s", r.body)
		}
		if err := json.Unmarshal([]byte(r.body), &info); err != nil || r.status != 200 {
			t.Fatalf("%d %s", r.status, r.body)
		}
		text, _ := json.Marshal(info.Network)
		return fmt.Sprint(info.AllowInternet, " ", string(text))
	}
	const hidden = `"rules":{"a.example":[{"transform":{"headers":{"X-Key":"(hidden)"}}}]}`
	if diff := cmp.Diff(`<nil> {"allowPublicTraffic":true,"denyOut":["10.0.0.0/8"],`+hidden+`}`, network()); diff != "" {
		t.Error(diff)
	}
	for _, c := range []struct {
		body, want string
	}{
		{`{"denyOut":["0.0.0.0/0"],"allowOut":["*.example"],"rules":{"a.example":[{"transform":{"headers":{"X-Key":"value-of-it-2"}}}]}}`, `<nil> {"allowOut":["*.example"],"allowPublicTraffic":true,"denyOut":["0.0.0.0/0"],` + hidden + `}`},
		{`{"allow_internet_access":false,"egressProxy":null,"rules":{"*.example":[{}],"b.example":[]}}`, `false {"allowPublicTraffic":true,"rules":{"*.example":[{}],"b.example":[{}]}}`},
		{`{"egressProxy":{"address":"Proxy.Example.:1080"}}`, `<nil> {"allowPublicTraffic":true,"egressProxy":{"address":"proxy.example:1080"}}`},
		{`{"egressProxy":{"address":"[2606:4700::1]:1","username":"value-of-it","password":"value-of-it-2","tls":{"enabled":true,"serverName":"P.example"}}}`,
			`<nil> {"allowPublicTraffic":true,"egressProxy":{"address":"[2606:4700::1]:1","tls":{"enabled":true,"serverName":"p.example"},"username":"(hidden)"}}`},
		{`{"egressProxy":{"address":"8.8.8.8:1","tls":{"enabled":false}}}`, `<nil> {"allowPublicTraffic":true,"egressProxy":{"address":"8.8.8.8:1"}}`},
		{`{}`, `<nil> {"allowPublicTraffic":true}`},
	} {
		if r := w.as(w.client, "PUT", "/sandboxes/"+id+"/network", c.body); r.status != 204 || r.body != "" {
			t.Fatalf("%s: %d %s", c.body, r.status, r.body)
		}
		if diff := cmp.Diff(c.want, network()); diff != "" {
			t.Errorf("after %s (-want +got):\n%s", c.body, diff)
		}
	}
	if r := w.as(w.other, "PUT", "/sandboxes/"+id+"/network", `{}`); r.status != 404 {
		t.Errorf("another team: %d %s", r.status, r.body)
	}
	if r := w.as(w.auditor, "PUT", "/sandboxes/"+id+"/network", `{}`); r.status != 403 {
		t.Errorf("an auditor: %d %s", r.status, r.body)
	}
	if strings.Contains(w.log.String(), "value-of-it") {
		t.Error("the value is in the log")
	}
}

func TestSetNetworkRefuses(t *testing.T) {
	w := newWorld(t)
	id, _ := w.create(`{"templateID":"base"}`)
	headers := func(host, name, value string) string {
		text, _ := json.Marshal(map[string]any{"rules": map[string]any{host: []any{map[string]any{"transform": map[string]any{"headers": map[string]string{name: value}}}}}})
		return string(text)
	}
	many := func(n int, entry string) string {
		all := make([]string, n)
		for i := range all {
			all[i] = fmt.Sprintf(entry, i)
		}
		return strings.Join(all, ",")
	}
	for _, c := range []struct {
		body   string
		status int
		says   string
	}{
		{`{"allowPublicTraffic":false}`, 400, "allowPublicTraffic is not of the way out"},
		{`{"maskRequestHost":"a"}`, 400, "maskRequestHost is not of the way out"},
		{`{"httpsPorts":[1]}`, 400, "httpsPorts is not of the way out"},
		{`{"denyOut":["example.com"]}`, 400, "network.denyOut has"},
		{`{"allowOut":["example.com"]}`, 400, "0.0.0.0/0"},
		{`{"dnsServers":["1.1.1.1"]}`, 400, `"error_code":"invalid_argument","field":"network.dnsServers"`},
		{`{"dnsServers":[]}`, 400, "network.dnsServers cannot be chosen"},
		{`{"egressProxy":{}}`, 400, "egressProxy.address is not"},
		{`{"egressProxy":{"address":"hush"}}`, 400, "egressProxy.address is not"},
		{`{"egressProxy":{"address":"socks5://u:hush@a.example:1080"}}`, 400, "egressProxy.address is not"},
		{`{"egressProxy":{"address":"a.example:0"}}`, 400, "egressProxy.address is not"},
		{`{"egressProxy":{"address":"a.example:65536"}}`, 400, "egressProxy.address is not"},
		{`{"egressProxy":{"address":"0x7f.1:1080"}}`, 400, "egressProxy.address is not"},
		{`{"egressProxy":{"address":":1080"}}`, 400, "egressProxy.address is not"},
		{`{"egressProxy":{"address":"a.example:1","password":"hush"}}`, 400, "a password and no username"},
		{`{"egressProxy":{"address":"a.example:1","username":"(hidden)","password":"hush"}}`, 400, "replies do not have them"},
		{`{"egressProxy":{"address":"a.example:1","username":"` + strings.Repeat("hush", 64) + `"}}`, 400, "username has 256 bytes"},
		{`{"egressProxy":{"address":"a.example:1","username":"u","password":"` + strings.Repeat("hush", 64) + `"}}`, 400, "password has 256 bytes"},
		{`{"egressProxy":{"address":"a.example:1","tls":{"enabled":false,"serverName":"b.example"}}}`, 400, "is not enabled and says how"},
		{`{"egressProxy":{"address":"a.example:1","tls":{"enabled":true,"serverName":"b c"}}}`, 400, "tls.serverName is"},
		{`{"egressProxy":{"address":"a.example:1","tls":{"enabled":true,"caCert":"hush"}}}`, 400, "no list of certificates"},
		{`{"egressProxy":{"address":"a.example:1","tls":{"enabled":true,"caCert":"` + strings.Repeat("hush", 2049) + `"}}}`, 400, "caCert has 8196 bytes"},
		{`{"rules":{` + many(11, `"h%d.example":[{}]`) + `}}`, 400, "has 11 domains"},
		{`{"rules":{"a.example":[{},{}]}}`, 400, "has 2 rules for a.example"},
		{`{"rules":{"a.example":[{}],"A.example":[{}]}}`, 400, "a.example\\\" twice"},
		{`{"rules":{"a.example":[{"transform":{"headers":{` + many(21, `"h%d":"v"`) + `}}}]}}`, 400, "has 21 headers"},
		{`{"rules":{"a.example":[{"transform":{"headers":{"a":"1","A":"2"}}}]}}`, 400, "header A twice"},
		{headers("*", "a", "v"), 400, "has the domain"},
		{headers("*.", "a", "v"), 400, "has the domain"},
		{headers("a.*.example", "a", "v"), 400, "has the domain"},
		{headers("10.0.0.1", "a", "v"), 400, "has the domain"},
		{headers("::1", "a", "v"), 400, "has the domain"},
		{headers("a.example", "host", "v"), 400, "has the header Host"},
		{headers("a.example", "transfer-encoding", "v"), 400, "has the header Transfer-Encoding"},
		{headers("a.example", "range", "bytes=0-3"), 400, "has the header Range"},
		{headers("a.example", "accept-encoding", "gzip"), 400, "has the header Accept-Encoding"},
		{headers("a.example", "Proxy-Authorization", "v"), 400, "has the header Proxy-Authorization"},
		{headers("a.example", ":path", "v"), 400, "has the header"},
		{headers("a.example", "a b", "v"), 400, "has the header"},
		{headers("a.example", "", "v"), 400, "has the header"},
		{headers("a.example", "a", "hush\r\nb: c"), 400, "value for the header A"},
		{headers("a.example", "a", "(hidden)"), 400, "replies do not have it"},
		{headers("a.example", "a", "Bearer ${e2b.secrets.hush}"), 501, "in a value is not supported"},
		{headers("a.example", "a", strings.Repeat("hush", 2048)), 400, "bytes of headers"},
	} {
		for _, call := range [][2]string{{"PUT", "/sandboxes/" + id + "/network"}, {"POST", "/v2/sandboxes"}} {
			body := c.body
			if call[0] == "POST" {
				if strings.Contains(c.says, "way out") {
					continue
				}
				body = `{"templateID":"base","network":` + body + `}`
			}
			r := w.as(w.client, call[0], call[1], body)
			if r.status != c.status || !strings.Contains(r.body, c.says) || strings.Contains(r.body, "hush") {
				t.Errorf("%s %.200s: %d %s, want %d %s", call[0], body, r.status, r.body, c.status, c.says)
			}
		}
	}
}

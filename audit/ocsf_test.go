package audit_test

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"airlock.dev/airlock/audit"
	"airlock.dev/airlock/audit/index"
)

// ocsf is what a type of event becomes: type_uid and the name of the activity.
var ocsf = map[string]string{
	"sandbox.create": "600301 Create", "sandbox.start": "600301 Create", "sandbox.snapshot": "600301 Create", "sandbox.fork": "600301 Create",
	"sandbox.list": "600302 Read", "sandbox.get": "600302 Read", "sandbox.connect": "600302 Read", "sandbox.logs": "600302 Read", "sandbox.metrics": "600302 Read",
	"sandbox.timeout": "600303 Update", "sandbox.pause": "600303 Update", "sandbox.resume": "600303 Update", "sandbox.network": "600303 Update",
	"sandbox.kill": "600304 Delete", "sandbox.end": "600304 Delete", "sandbox.changed": "600303 Update", "sandbox.budget": "600399 Other",
	"exec.start": "600301 Create", "exec.list": "600302 Read", "exec.attach": "600302 Read", "exec.output": "600302 Read",
	"exec.input": "600303 Update", "exec.signal": "600303 Update", "exec.resize": "600303 Update", "exec.end": "600304 Delete",
	"file.write": "600301 Create", "file.mkdir": "600301 Create", "file.download": "600302 Read", "file.list": "600302 Read", "file.stat": "600302 Read", "file.watch": "600302 Read",
	"file.move": "600303 Update", "file.remove": "600304 Delete", "file.end": "600399 Other",
	"port.serve": "400101 Open", "port.end": "400102 Close", "net.connect": "400101 Open", "net.end": "400102 Close",
	"dns.resolve": "400106 Traffic", "dns.end": "400106 Traffic", "http.request": "400299 Other", "http.end": "400299 Other",
	"secret.use": "600302 Read", "secret.end": "600399 Other",
	"secret.set": "300403 Update", "secret.rotate": "300403 Update", "secret.remove": "300404 Delete",
	"db.select": "600501 Read", "db.update": "600502 Update", "db.connect": "600503 Connect", "db.call": "600504 Query", "db.insert": "600505 Write",
	"db.delete": "600507 Delete", "db.define": "600599 Other", "db.end": "600599 Other",
	"app.propose": "300401 Create", "app.approve": "300403 Update", "app.revoke": "300404 Delete", "app.run": "600301 Create", "app.end": "600399 Other",
	"approval.grant": "300403 Update", "approval.deny": "300403 Update",
	"key.create": "300401 Create", "key.revoke": "300404 Delete", "key.end": "300499 Other",
	"policy.load": "300403 Update", "audit.details": "300402 Read",
	"log.open": "300401 Create", "log.rotate": "300403 Update", "log.close": "300499 Other", "log.boot": "300499 Other", "log.clock": "300499 Other", "log.gap": "300499 Other",
	"hold.set": "300401 Create", "hold.release": "300404 Delete", "retention.drop": "300404 Delete",
	"subject.erase": "300404 Delete", "subject.erased": "300404 Delete",
}

func exported(t *testing.T, event string) map[string]any {
	t.Helper()
	line, err := audit.OCSF([]byte(event))
	if err != nil {
		t.Fatal(err)
	}
	var out map[string]any
	if err := json.Unmarshal(line, &out); err != nil {
		t.Fatal(err)
	}
	return out
}

func TestOCSFOfEveryType(t *testing.T) {
	for typ, want := range ocsf {
		out := exported(t, `{"v":1,"seq":2,"id":"x","time":"2026-12-02T10:00:00.000000000Z","epoch":1,"type":"`+typ+`","source":"host","actor":{"kind":"system"}}`)
		if got := fmt.Sprintf("%.0f %s", out["type_uid"], out["activity_name"]); got != want {
			t.Errorf("%s becomes %s, want %s", typ, got, want)
		}
	}
}

// TestTypesAreKnown: the table above, and the names that a query may use, have
// each type that the schema's actions become and that the code writes.
func TestTypesAreKnown(t *testing.T) {
	written := map[string]bool{"sandbox.start": true, "sandbox.changed": true}
	schema, err := os.ReadFile("../policy/schema.cedarschema")
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range regexp.MustCompile(`"([a-z]+):([a-z]+)"`).FindAllStringSubmatch(string(schema), -1) {
		written[a[1]+"."+a[2]], written[a[1]+".end"] = true, true
	}
	literal := regexp.MustCompile(`Type: +"([a-z]+\.[a-z]+)"`)
	for _, dir := range []string{".", "../api", "../control", "../cmd"} {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
				return err
			}
			text, err := os.ReadFile(path)
			for _, m := range literal.FindAllStringSubmatch(string(text), -1) {
				written[m[1]] = true
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if len(written) < 60 {
		t.Fatalf("only %d types were found", len(written))
	}
	for typ := range written {
		if ocsf[typ] == "" {
			t.Errorf("nobody chose what %s is in OCSF", typ)
		}
	}
	for typ := range ocsf {
		if !written[typ] {
			t.Errorf("nothing writes %s", typ)
		}
	}
	if got, want := index.Types(), slices.Sorted(maps.Keys(ocsf)); !slices.Equal(got, want) {
		t.Errorf("queries know other types:\n%q\n%q", got, want)
	}
}

func TestOCSFOfAnEnd(t *testing.T) {
	out := exported(t, `{"v":1,"seq":9,"id":"x","time":"2026-12-02T10:00:00.000000000Z","epoch":1,"type":"exec.end","source":"host","team":"acme","sandbox":"i1",
		"actor":{"kind":"token","id":"i1"},"outcome":{"status":"ok","exitCode":3},"of":8}`)
	if out["status"] != "Success" || out["unmapped"].(map[string]any)["exit_code"] != 3.0 {
		t.Errorf("a program that ended with 3: %v", out)
	}
	out = exported(t, `{"v":1,"seq":9,"id":"x","time":"2026-12-02T10:00:00.000000000Z","epoch":1,"type":"exec.end","source":"host","actor":{"kind":"token"},"outcome":{"status":"ok","exitCode":0}}`)
	if out["unmapped"].(map[string]any)["exit_code"] != 0.0 {
		t.Errorf("a program that ended with 0: %v", out)
	}
}

func TestOCSFHasNothingEmpty(t *testing.T) {
	for _, event := range []string{
		`"type":"file.write","actor":{"kind":"token","id":"i1"},"call":{"principal":{"type":"Team","id":"acme"},"action":"file:write","resource":{"type":"Path","id":""}},"decision":{"effect":"permit"},"outcome":{"status":"ok"}`,
		`"type":"port.end","actor":{"kind":"visitor"},"outcome":{"status":"error"}`,
		`"type":"log.boot","actor":{"kind":"system"}`,
		`"type":"db.call","actor":{"kind":"agent"},"call":{"principal":{"type":"App","id":""},"action":"db:call","resource":{"type":"Routine","id":""}}`,
	} {
		out := exported(t, `{"v":1,"seq":9,"id":"x","time":"2026-12-02T10:00:00.000000000Z","epoch":1,"source":"host",`+event+`}`)
		if where := empties("", out); len(where) > 0 {
			t.Errorf("%s has empty %q", event, where)
		}
	}
}

func empties(at string, v any) (all []string) {
	switch v := v.(type) {
	case string:
		if v == "" {
			all = append(all, at)
		}
	case map[string]any:
		if len(v) == 0 {
			all = append(all, at)
		}
		for name, value := range v {
			all = append(all, empties(at+"."+name, value)...)
		}
	case []any:
		if len(v) == 0 {
			all = append(all, at)
		}
		for _, value := range v {
			all = append(all, empties(at+"[]", value)...)
		}
	}
	slices.Sort(all)
	return all
}

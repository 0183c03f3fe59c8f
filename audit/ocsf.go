package audit

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"
)

// ocsfVersion is the version of the Open Cybersecurity Schema Framework that
// events are exported in.
const ocsfVersion = "1.6.0"

// The classes of OCSF that events become. type_uid is class * 100 + activity.
const (
	ocsfEntity  = 3004 // Entity Management: the log itself, keys, holds
	ocsfNetwork = 4001 // Network Activity: connections and names
	ocsfHTTP    = 4002 // HTTP Activity
	ocsfAPI     = 6003 // API Activity: what clients of the API do
	ocsfData    = 6005 // Datastore Activity
)

// ocsfKind is what an event becomes.
type ocsfKind struct {
	class    int
	activity int
	name     string // of the activity
}

// ocsfKinds has every type that is written and every action of the policies'
// schema, so that what an event becomes is chosen and not left over.
var ocsfKinds = map[string]ocsfKind{
	"sandbox.create": {ocsfAPI, 1, "Create"}, "sandbox.start": {ocsfAPI, 1, "Create"}, "sandbox.snapshot": {ocsfAPI, 1, "Create"}, "sandbox.fork": {ocsfAPI, 1, "Create"},
	"sandbox.list": {ocsfAPI, 2, "Read"}, "sandbox.get": {ocsfAPI, 2, "Read"}, "sandbox.connect": {ocsfAPI, 2, "Read"}, "sandbox.logs": {ocsfAPI, 2, "Read"}, "sandbox.metrics": {ocsfAPI, 2, "Read"},
	"sandbox.timeout": {ocsfAPI, 3, "Update"}, "sandbox.pause": {ocsfAPI, 3, "Update"}, "sandbox.resume": {ocsfAPI, 3, "Update"}, "sandbox.network": {ocsfAPI, 3, "Update"}, "sandbox.changed": {ocsfAPI, 3, "Update"},
	"sandbox.kill": {ocsfAPI, 4, "Delete"}, "sandbox.end": {ocsfAPI, 4, "Delete"}, "sandbox.budget": {ocsfAPI, 99, "Other"},

	"exec.start": {ocsfAPI, 1, "Create"}, "exec.list": {ocsfAPI, 2, "Read"}, "exec.attach": {ocsfAPI, 2, "Read"}, "exec.output": {ocsfAPI, 2, "Read"},
	"exec.input": {ocsfAPI, 3, "Update"}, "exec.signal": {ocsfAPI, 3, "Update"}, "exec.resize": {ocsfAPI, 3, "Update"}, "exec.end": {ocsfAPI, 4, "Delete"},

	"file.write": {ocsfAPI, 1, "Create"}, "file.mkdir": {ocsfAPI, 1, "Create"},
	"file.download": {ocsfAPI, 2, "Read"}, "file.list": {ocsfAPI, 2, "Read"}, "file.stat": {ocsfAPI, 2, "Read"}, "file.watch": {ocsfAPI, 2, "Read"},
	"file.move": {ocsfAPI, 3, "Update"}, "file.remove": {ocsfAPI, 4, "Delete"}, "file.end": {ocsfAPI, 99, "Other"},

	"port.serve": {ocsfNetwork, 1, "Open"}, "port.end": {ocsfNetwork, 2, "Close"},
	"net.connect": {ocsfNetwork, 1, "Open"}, "net.end": {ocsfNetwork, 2, "Close"},
	"dns.resolve": {ocsfNetwork, 6, "Traffic"}, "dns.end": {ocsfNetwork, 6, "Traffic"},
	"http.request": {ocsfHTTP, 99, "Other"}, "http.end": {ocsfHTTP, 99, "Other"},
	"secret.use": {ocsfAPI, 2, "Read"}, "secret.end": {ocsfAPI, 99, "Other"},
	"secret.set": {ocsfEntity, 3, "Update"}, "secret.rotate": {ocsfEntity, 3, "Update"}, "secret.remove": {ocsfEntity, 4, "Delete"},

	"db.select": {ocsfData, 1, "Read"}, "db.update": {ocsfData, 2, "Update"}, "db.connect": {ocsfData, 3, "Connect"}, "db.call": {ocsfData, 4, "Query"},
	"db.insert": {ocsfData, 5, "Write"}, "db.delete": {ocsfData, 7, "Delete"}, "db.define": {ocsfData, 99, "Other"}, "db.end": {ocsfData, 99, "Other"},

	"app.propose": {ocsfEntity, 1, "Create"}, "app.approve": {ocsfEntity, 3, "Update"}, "app.revoke": {ocsfEntity, 4, "Delete"}, "app.run": {ocsfAPI, 1, "Create"}, "app.end": {ocsfAPI, 99, "Other"},

	"approval.grant": {ocsfEntity, 3, "Update"}, "approval.deny": {ocsfEntity, 3, "Update"},
	"key.create": {ocsfEntity, 1, "Create"}, "key.revoke": {ocsfEntity, 4, "Delete"}, "key.end": ocsfOther,
	"policy.load": {ocsfEntity, 3, "Update"}, "audit.details": {ocsfEntity, 2, "Read"},
	"log.open": {ocsfEntity, 1, "Create"}, "log.rotate": {ocsfEntity, 3, "Update"}, "log.close": ocsfOther, "log.boot": ocsfOther, "log.clock": ocsfOther, "log.gap": ocsfOther,
	"hold.set": {ocsfEntity, 1, "Create"}, "hold.release": {ocsfEntity, 4, "Delete"}, "retention.drop": {ocsfEntity, 4, "Delete"},
	"subject.erase": {ocsfEntity, 4, "Delete"}, "subject.erased": {ocsfEntity, 4, "Delete"},
}

// ocsfOther is also for types of a newer version.
var ocsfOther = ocsfKind{ocsfEntity, 99, "Other"}

var ocsfClasses = map[int]struct {
	category int
	name     string
}{
	ocsfEntity: {3, "Entity Management"}, ocsfNetwork: {4, "Network Activity"}, ocsfHTTP: {4, "HTTP Activity"},
	ocsfAPI: {6, "API Activity"}, ocsfData: {6, "Datastore Activity"},
}

// OCSF returns an event as one JSON line of the Open Cybersecurity Schema
// Framework, version 1.6 (https://schema.ocsf.io/1.6.0). What that has no
// place for is under "unmapped", so that nothing is lost.
func OCSF(event []byte) ([]byte, error) {
	var e struct {
		Seq uint64 `json:"seq"`
		wire
	}
	if err := json.Unmarshal(event, &e); err != nil {
		return nil, fmt.Errorf("read an event: %w", err)
	}
	at, err := time.Parse(time.RFC3339Nano, e.Time)
	if err != nil {
		return nil, fmt.Errorf("read the time of event %d: %w", e.Seq, err)
	}
	kind, known := ocsfKinds[e.Type]
	if !known {
		kind = ocsfOther
	}
	class := ocsfClasses[kind.class]
	out := map[string]any{
		"class_uid": kind.class, "class_name": class.name, "category_uid": class.category,
		"activity_id": kind.activity, "activity_name": kind.name, "type_uid": kind.class*100 + kind.activity,
		"time": at.UnixMilli(), "severity_id": 1, "message": e.Type,
		"metadata": map[string]any{
			"version": ocsfVersion, "uid": e.ID, "sequence": e.Seq, "original_time": e.Time, "log_name": "airlock audit", "tenant_uid": e.Team,
			"product":  map[string]any{"name": "Airlock", "vendor_name": "Airlock"},
			"profiles": []string{"security_control"},
		},
		"actor": map[string]any{"user": map[string]any{"uid": e.Actor.ID, "type": e.Actor.Kind, "type_id": 99, "groups": []any{map[string]any{"name": string(e.Actor.Role)}}}},
		"unmapped": unmapped(map[string]any{
			"source": e.Source, "sandbox": e.Sandbox, "execution": e.Execution, "app": e.App, "epoch": e.Epoch, "of": e.Of,
			"context": contextOf(e.Call), "log": e.Log, "sealed_parts": len(e.Sealed), "clipped": e.Clipped, "counts": countsOf(e.Outcome), "exit_code": exitCodeOf(e.Outcome),
		}),
	}
	if e.Call != nil {
		resource := map[string]any{"type": e.Call.Resource.Type, "uid": e.Call.Resource.ID}
		switch kind.class {
		case ocsfAPI:
			out["api"] = map[string]any{"operation": e.Call.Action}
			out["resources"] = []any{resource}
			out["src_endpoint"] = map[string]any{"name": "api"}
		case ocsfNetwork, ocsfHTTP:
			out["dst_endpoint"] = map[string]any{"uid": e.Sandbox, "name": e.Call.Resource.ID}
		case ocsfData:
			out["database"] = map[string]any{"type_id": 1, "name": e.Call.Resource.ID}
			out["src_endpoint"] = map[string]any{"uid": e.Sandbox}
		case ocsfEntity:
			out["entity"] = resource
		}
	} else if kind.class == ocsfEntity {
		out["entity"] = map[string]any{"type": "log", "name": e.Type}
	} else if kind.class == ocsfAPI {
		out["api"] = map[string]any{"operation": e.Type}
		out["src_endpoint"] = map[string]any{"name": "api"}
	} else {
		out["dst_endpoint"] = map[string]any{"uid": e.Sandbox}
	}
	if d := e.Decision; d != nil {
		out["action_id"], out["disposition_id"] = 2, 2 // denied, blocked
		if d.Effect == Permit {
			out["action_id"], out["disposition_id"] = 1, 1
		} else {
			out["severity_id"] = 3
		}
		out["policy"] = map[string]any{"uid": strings.Join(d.Policies, ","), "desc": d.Reason, "version": d.Set}
	}
	if o := e.Outcome; o != nil {
		out["status_id"], out["status"] = 2, "Failure"
		if o.Status == "ok" {
			out["status_id"], out["status"] = 1, "Success"
		}
		out["status_code"], out["status_detail"] = o.Code, o.Message
	}
	rest := out["unmapped"] // which is as the event has it
	delete(out, "unmapped")
	prune(out)
	out["unmapped"] = rest
	line, err := json.Marshal(out)
	if err != nil {
		return nil, fmt.Errorf("write event %d as OCSF: %w", e.Seq, err)
	}
	return printable(line), nil
}

func unmapped(all map[string]any) map[string]any {
	for k, v := range all {
		switch v := v.(type) {
		case string:
			if v == "" {
				delete(all, k)
			}
		case int:
			if v == 0 {
				delete(all, k)
			}
		case bool:
			if !v {
				delete(all, k)
			}
		case *uint64:
			if v == nil {
				delete(all, k)
			}
		case *int:
			if v == nil {
				delete(all, k)
			}
		case *LogPart:
			if v == nil {
				delete(all, k)
			}
		case map[string]any:
			if len(v) == 0 {
				delete(all, k)
			}
		case map[string]int64:
			if len(v) == 0 {
				delete(all, k)
			}
		}
	}
	return all
}

// prune removes what is empty: OCSF has absent attributes, not empty ones.
func prune(v any) (empty bool) {
	switch v := v.(type) {
	case string:
		return v == ""
	case map[string]any:
		for name, value := range v {
			if prune(value) {
				delete(v, name)
			}
		}
		return len(v) == 0
	case []any:
		for _, value := range v { // a list here has one
			if !prune(value) {
				return false
			}
		}
		return true
	}
	return false
}

func contextOf(c *Call) map[string]any {
	if c == nil {
		return nil
	}
	return c.Context
}

func countsOf(o *Outcome) map[string]int64 {
	if o == nil {
		return nil
	}
	return o.Counts
}

// exitCodeOf is of a program: one that is not 0 is no failure of the act.
func exitCodeOf(o *Outcome) *int {
	if o == nil {
		return nil
	}
	return o.ExitCode
}

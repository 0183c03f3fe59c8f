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

// ocsfKind is what an event becomes: by the longest prefix of its type.
type ocsfKind struct {
	prefix   string
	class    int
	activity int
}

var ocsfKinds = []ocsfKind{
	{"sandbox.create", ocsfAPI, 1}, {"sandbox.start", ocsfAPI, 1}, {"sandbox.kill", ocsfAPI, 4}, {"sandbox.end", ocsfAPI, 4}, {"sandbox.timeout", ocsfAPI, 3}, {"sandbox.", ocsfAPI, 2},
	{"exec.start", ocsfAPI, 1}, {"exec.end", ocsfAPI, 4}, {"exec.signal", ocsfAPI, 3}, {"exec.", ocsfAPI, 2},
	{"file.write", ocsfAPI, 1}, {"file.make", ocsfAPI, 1}, {"file.move", ocsfAPI, 3}, {"file.remove", ocsfAPI, 4}, {"file.", ocsfAPI, 2},
	{"port.serve", ocsfNetwork, 1}, {"port.end", ocsfNetwork, 2},
	{"net.connect", ocsfNetwork, 1}, {"net.end", ocsfNetwork, 2}, {"dns.", ocsfNetwork, 6}, {"http.", ocsfHTTP, 99}, {"db.", ocsfData, 99},
	{"log.open", ocsfEntity, 1}, {"hold.set", ocsfEntity, 1}, {"hold.release", ocsfEntity, 4}, {"retention.", ocsfEntity, 4}, {"subject.erase", ocsfEntity, 4}, {"policy.", ocsfEntity, 3},
	{"", ocsfEntity, 99},
}

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
	var kind ocsfKind
	for _, k := range ocsfKinds {
		if strings.HasPrefix(e.Type, k.prefix) {
			kind = k
			break
		}
	}
	class := ocsfClasses[kind.class]
	out := map[string]any{
		"class_uid": kind.class, "class_name": class.name, "category_uid": class.category,
		"activity_id": kind.activity, "type_uid": kind.class*100 + kind.activity,
		"time": at.UnixMilli(), "severity_id": 1, "message": e.Type,
		"metadata": map[string]any{
			"version": ocsfVersion, "uid": e.ID, "sequence": e.Seq, "original_time": e.Time, "log_name": "airlock audit", "tenant_uid": e.Team,
			"product":  map[string]any{"name": "Airlock", "vendor_name": "Airlock"},
			"profiles": []string{"security_control"},
		},
		"actor": map[string]any{"user": map[string]any{"uid": e.Actor.ID, "type": e.Actor.Kind, "type_id": 99, "groups": []any{map[string]any{"name": string(e.Actor.Role)}}}},
		"unmapped": unmapped(map[string]any{
			"source": e.Source, "sandbox": e.Sandbox, "execution": e.Execution, "app": e.App, "epoch": e.Epoch, "of": e.Of,
			"context": contextOf(e.Call), "log": e.Log, "sealed_parts": len(e.Sealed), "clipped": e.Clipped, "counts": countsOf(e.Outcome),
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

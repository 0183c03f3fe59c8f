package test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/client"
)

// What a policy holds waits for a person, who sees what it is and decides it
// with a key of theirs; the operator of the machine cannot.
func TestApprovals(t *testing.T) {
	s := networked(t)
	var asked int
	url := s.secure(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked++
		fmt.Fprint(w, "deleted")
	}))
	text, err := os.ReadFile(s.policies)
	if err != nil {
		t.Fatal(err)
	}
	text = bytes.ReplaceAll(text, []byte(`@id("servers-of-the-test")`), []byte(`@id("deletes-wait") @hold("data-owners")
permit (principal, action == Action::"http:request", resource)
when { resource.name == "`+inside+`" && context.ip == ip("127.0.0.1") && context.method == "DELETE" };
@id("servers-of-the-test")`))
	if err := os.WriteFile(s.policies, text, 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := s.airlock("", "policy", "reload"); err != nil {
		t.Fatalf("airlock policy reload: %v\n%s", err, out)
	}
	maker := s.key("red", airlock.Client)
	sb := create(t, s.as(maker), client.CreateRequest{Timeout: 5 * time.Minute, Policy: ownPolicy})
	approver := s.key("data-owners", airlock.Approver)
	// A key is its holder's by the operator's socket, too.
	ways := [][]string{{"--url", s.url}, {"--data-dir", s.dataDir}}
	way := ways[0]
	command := func(key string, args ...string) (string, error) {
		cmd := exec.Command(filepath.Join(binDir, "airlock"), append(way[:2:2], args...)...)
		cmd.Env = []string{"AIRLOCK_API_KEY=" + key}
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	for i, decision := range []string{"approve", "deny"} {
		way = ways[i]
		answer := make(chan string, 1)
		go func() {
			_, out := run(t, sb, "curl -sS -X DELETE "+url+"people/7")
			answer <- out
		}()
		var waiting client.Approval
		until(t, func() bool {
			out, err := command(approver, "approvals", "--json")
			return err == nil && json.Unmarshal([]byte(out), &waiting) == nil && waiting.ID != ""
		})
		if waiting.Sandbox != sb.ID || waiting.Resource != inside || waiting.Context["method"] != "DELETE" || waiting.Context["path"] != "/people/7" || waiting.Team != "red" {
			t.Errorf("what waits: %+v", waiting)
		}
		if out, err := s.airlock("", "approvals", "approve", waiting.ID); err == nil || !strings.Contains(out, "role approver") {
			t.Errorf("the operator approves: %s", out)
		}
		if out, err := command(maker, "approvals"); err == nil {
			t.Errorf("a client's key lists approvals: %s", out)
		}
		if out, err := command(approver, "approvals", decision, waiting.ID, "--reason", "ticket 4711"); err != nil {
			t.Fatalf("airlock approvals %s: %v\n%s", decision, err, out)
		}
		if out, want := <-answer, map[string]string{"approve": "deleted", "deny": "denied it"}[decision]; !strings.Contains(out, want) {
			t.Errorf("%s: %s", decision, out)
		}
	}
	if asked != 1 {
		t.Errorf("upstream was asked %d times", asked)
	}
	if out := s.trail("query", "type=approval.*", "--json"); strings.Count(out, "ticket 4711") != 2 {
		t.Errorf("the trail: %s", out)
	}
}

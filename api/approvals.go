package api

import (
	"net/http"
	"unicode"

	"airlock.dev/airlock"
	"airlock.dev/airlock/control"
)

// approver lets approvers in, and operators, who may look: who may decide is
// for control to say.
func approver(s *server, r *request) error {
	err := s.authenticate(r, airlock.Approver)
	if airlock.CodeOf(err) == airlock.Denied && s.authenticate(r, airlock.Operator) == nil {
		return nil
	}
	return err
}

// approvals lists what waits for the caller. There are never more than control
// lets wait, so it is one page.
func (s *server) approvals(w http.ResponseWriter, r *request) error {
	all := s.Sandboxes.Approvals(r.caller)
	if all == nil {
		all = []control.Approval{}
	}
	writeJSON(w, http.StatusOK, all)
	return nil
}

// maxReason bounds what an approver says, in bytes.
const maxReason = 500

func (s *server) decide(w http.ResponseWriter, r *request) error {
	var body struct {
		Approve *bool  `json:"approve"`
		Reason  string `json:"reason"`
	}
	if err := readJSON(w, r, &body); err != nil {
		return err
	}
	if body.Approve == nil {
		return airlock.Invalidf("approve", "send true or false", "approve is missing")
	}
	if len(body.Reason) > maxReason || !printableText(body.Reason) {
		return airlock.Invalidf("reason", "say it in at most 500 bytes on one line", "the reason is too long or does not print")
	}
	if err := s.Sandboxes.Decide(r.Context(), r.caller, r.PathValue("id"), *body.Approve, body.Reason); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func printableText(s string) bool {
	for _, r := range s {
		if !unicode.IsPrint(r) {
			return false
		}
	}
	return true
}

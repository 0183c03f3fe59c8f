package api

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"net/http"
	"time"

	"airlock.dev/airlock"
	"airlock.dev/airlock/audit"
)

// Root is what the api asks of the gateway's certificate authority.
type Root interface {
	// Trusted are the certificates that sandboxes trust: two while one is replaced.
	Trusted() []*x509.Certificate
	ID() string
	Rotate(ctx context.Context) error
}

// rootBody is the authority, as the API tells it.
type rootBody struct {
	ID    string     `json:"id"` // of all of them together
	Roots []rootInfo `json:"roots"`
}

type rootInfo struct {
	Subject string    `json:"subject"`
	Until   time.Time `json:"until"`
	PEM     string    `json:"pem"`
}

func (s *server) gatewayRoot(w http.ResponseWriter, _ *request) error {
	body := rootBody{ID: s.Root.ID(), Roots: []rootInfo{}}
	for _, c := range s.Root.Trusted() {
		body.Roots = append(body.Roots, rootInfo{c.Subject.CommonName, c.NotAfter, pemOf(c)})
	}
	writeJSON(w, http.StatusOK, body)
	return nil
}

// rotateRoot begins to replace the authority. The next server makes images that
// trust both, and the one after the last sandbox from before signs with the new.
func (s *server) rotateRoot(w http.ResponseWriter, r *request) error {
	receipt, err := s.Trail.Append(r.Context(), audit.Event{Type: "key.create", Actor: actorOf(r.caller), Call: asked(r, "key:create", "Root", s.Root.ID())})
	if err != nil {
		return err
	}
	err = s.Root.Rotate(r.Context())
	o := audit.Outcome{Status: "ok", Message: s.Root.ID()}
	if err != nil {
		o = audit.Outcome{Status: "error", Code: string(airlock.CodeOf(err))}
	}
	seq := receipt.Seq()
	s.Trail.Owe(r.Context(), audit.Event{Type: "key.end", Actor: actorOf(r.caller), Of: &seq, Outcome: o})
	if err != nil {
		return err
	}
	s.Log.InfoContext(r.Context(), "the gateway's certificate authority is being replaced", "by", r.caller.KeyID)
	return s.gatewayRoot(w, r)
}

func pemOf(c *x509.Certificate) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw}))
}

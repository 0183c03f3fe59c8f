package api

import (
	"context"
	"crypto/rand"
	"errors"
	"net/http"
	"strconv"

	"airlock.dev/airlock"
	"connectrpc.com/connect"
)

// codes is where an error's code becomes an HTTP status and a Connect code.
// Where Connect has no fitting word, the one is taken of which E2B's SDKs make
// the least misleading exception: they read resource_exhausted as a rate limit.
var codes = map[airlock.Code]struct {
	http int
	rpc  connect.Code
}{
	airlock.Invalid:         {http.StatusBadRequest, connect.CodeInvalidArgument},
	airlock.Unauthenticated: {http.StatusUnauthorized, connect.CodeUnauthenticated},
	airlock.Denied:          {http.StatusForbidden, connect.CodePermissionDenied},
	airlock.NotFound:        {http.StatusNotFound, connect.CodeNotFound},
	airlock.Exists:          {http.StatusConflict, connect.CodeAlreadyExists},
	airlock.Conflict:        {http.StatusConflict, connect.CodeFailedPrecondition},
	airlock.Exhausted:       {http.StatusTooManyRequests, connect.CodeResourceExhausted},
	airlock.TooLarge:        {http.StatusRequestEntityTooLarge, connect.CodeOutOfRange},
	airlock.NoSpace:         {http.StatusInsufficientStorage, connect.CodeFailedPrecondition},
	airlock.Gone:            {http.StatusBadGateway, connect.CodeUnavailable},
	airlock.PortClosed:      {http.StatusBadGateway, connect.CodeUnavailable},
	airlock.Canceled:        {499, connect.CodeCanceled}, // nobody is left to read it
	airlock.Deadline:        {http.StatusGatewayTimeout, connect.CodeDeadlineExceeded},
	airlock.Unavailable:     {http.StatusServiceUnavailable, connect.CodeUnavailable},
	airlock.Unimplemented:   {http.StatusNotImplemented, connect.CodeUnimplemented},
	airlock.Internal:        {http.StatusInternalServerError, connect.CodeInternal},
}

// public returns what a client may know of err. Of an internal error that is
// only an id, under which the log has the rest.
func (s *server) public(ctx context.Context, err error, where string) *airlock.Error {
	var coded *airlock.Error
	if !errors.As(err, &coded) {
		coded = &airlock.Error{Code: airlock.CodeOf(err), Message: err.Error()}
	}
	if _, known := codes[coded.Code]; !known || coded.Code == airlock.Internal {
		id := rand.Text()[:10]
		s.Log.ErrorContext(ctx, "internal error", "id", id, "where", where, "err", err)
		coded = airlock.Errorf(airlock.Internal, "internal error (the server's log has it as %s)", id)
	}
	return coded
}

// errorBody is the body of every error of the control plane. Data-plane
// bodies have code and message only, as the SDK's tests compare them.
type errorBody struct {
	Code      int          `json:"code"`
	Message   string       `json:"message"`
	ErrorCode airlock.Code `json:"error_code,omitempty"`
	Field     string       `json:"field,omitempty"`
}

// fail answers err.
func (s *server) fail(w http.ResponseWriter, r *request, err error) {
	e := s.public(r.Context(), err, r.Method+" "+r.URL.Path)
	status := codes[e.Code].http
	id := r.Header.Get("E2b-Sandbox-Id")
	if id != "" && e.Code == airlock.Gone {
		writeJSON(w, status, map[string]any{"sandboxId": baseID(id), "message": "The sandbox was not found", "code": status})
		return
	}
	if e.Code == airlock.Exhausted && e.RetryAfter > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(e.RetryAfter))
	}
	body := errorBody{Code: status, Message: e.Public()}
	if id == "" {
		body.ErrorCode, body.Field = e.Code, e.Field
	}
	writeJSON(w, status, body)
}

// rpcError is fail for Connect. A sandbox that ended under a call has no code
// that the SDKs understand: they want the connection broken off, and then ask
// for its health.
func (s *server) rpcError(ctx context.Context, err error, procedure string) error {
	var done *connect.Error
	if err == nil || errors.As(err, &done) {
		return err
	}
	e := s.public(ctx, err, procedure)
	if e.Code == airlock.Gone {
		panic(http.ErrAbortHandler)
	}
	return connect.NewError(codes[e.Code].rpc, errors.New(e.Public()))
}

// rpcErrors is the interceptor that applies rpcError.
type rpcErrors struct{ s *server }

func (i rpcErrors) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		reply, err := next(ctx, req)
		return reply, i.s.rpcError(ctx, err, req.Spec().Procedure)
	}
}

func (i rpcErrors) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (i rpcErrors) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		return i.s.rpcError(ctx, next(ctx, conn), conn.Spec().Procedure)
	}
}

package channel

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"airlock.dev/airlock"
)

// badReply is what the host makes of a guest that does not keep to wire.go.
func badReply(method string, err error) error {
	return airlock.Errorf(airlock.Internal, "the guest answered %s out of form", method).Because(err)
}

// Call makes a call with one request and one reply.
func Call[Reply any](ctx context.Context, m *Mux, method string, req any) (Reply, error) {
	var reply Reply
	s, err := m.Open(ctx, method, req)
	if err != nil {
		return reply, err
	}
	defer s.Close()
	return RecvReply[Reply](ctx, s, method)
}

// RecvReply receives the one reply of a call.
func RecvReply[Reply any](ctx context.Context, s *Stream, method string) (Reply, error) {
	var reply Reply
	tag, body, err := s.Recv(ctx)
	if errors.Is(err, io.EOF) {
		return reply, badReply(method, io.ErrUnexpectedEOF)
	}
	if err != nil {
		return reply, err
	}
	if tag != TagReply {
		return reply, badReply(method, errors.New("unexpected tag"))
	}
	if err := json.Unmarshal(body, &reply); err != nil {
		return reply, badReply(method, err)
	}
	return reply, nil
}

// maxAll bounds the replies of one CallAll together, in bytes.
const maxAll = 8 << 20

// CallAll makes a call whose replies end with the stream; more than limit of
// them, or more than maxAll bytes, are an error.
func CallAll[Reply any](ctx context.Context, m *Mux, method string, req any, limit int) ([]Reply, error) {
	s, err := m.Open(ctx, method, req)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	var all []Reply
	size := 0
	for {
		_, body, err := s.Recv(ctx)
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		if size += len(body); len(all) >= limit || size > maxAll {
			return nil, &airlock.Error{Code: airlock.TooLarge, Message: fmt.Sprintf("the answer has more than %d entries or %d MiB", limit, maxAll>>20), Hint: "ask for a part of it, or run a command that does"}
		}
		var reply Reply
		if err := json.Unmarshal(body, &reply); err != nil {
			return nil, badReply(method, err)
		}
		all = append(all, reply)
	}
}

// SendReply sends v as a reply with tag TagReply.
func SendReply(ctx context.Context, s *Stream, v any) error {
	return SendJSON(ctx, s, TagReply, v)
}

// SendJSON sends v with a tag.
func SendJSON(ctx context.Context, s *Stream, tag byte, v any) error {
	body, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return s.Send(ctx, tag, body)
}

// Writer sends what is written as messages with tag.
func (s *Stream) Writer(ctx context.Context, tag byte) io.Writer { return streamWriter{ctx, s, tag} }

type streamWriter struct {
	ctx context.Context
	s   *Stream
	tag byte
}

func (w streamWriter) Write(p []byte) (int, error) {
	n := 0
	for n < len(p) {
		part := p[n:min(n+MaxPayload, len(p))]
		if err := w.s.Send(w.ctx, w.tag, part); err != nil {
			return n, err
		}
		n += len(part)
	}
	return n, nil
}

// Reader reads the bodies of messages with tag; another tag is an error.
func (s *Stream) Reader(ctx context.Context, tag byte) io.Reader {
	return &streamReader{ctx: ctx, s: s, tag: tag}
}

type streamReader struct {
	ctx  context.Context
	s    *Stream
	tag  byte
	msg  message
	rest []byte // of msg
}

func (r *streamReader) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		msg, err := r.s.recv(r.ctx)
		if err != nil {
			return 0, err
		}
		if msg.tag != r.tag {
			return 0, badReply("stream", errors.New("unexpected tag"))
		}
		r.msg, r.rest = msg, msg.body
	}
	n := copy(p, r.rest)
	if r.rest = r.rest[n:]; len(r.rest) == 0 {
		r.msg.free()
	}
	return n, nil
}

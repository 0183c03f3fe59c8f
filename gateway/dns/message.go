package dns

import (
	"bytes"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

const (
	queryMost  = 4096 // bytes of a query; all honest ones are far below
	headerSize = 12
	plainSize  = 512  // of a reply over UDP to who does not say more
	ednsSize   = 1232 // that we say and send at most: no network fragments it
	streamSize = 65535
	textMost   = 512 // bytes of the text of an extended error
	moreMost   = 4   // records behind the question: OPT, a signature
)

// rcodeBadVersion is for a version of EDNS that is not 0; only part of it is
// in the header.
const rcodeBadVersion = 16

// ednsError is the option of EDNS that extended errors (RFC 8914) are in, and
// the others are their codes.
const (
	ednsError  = 15
	otherError = 0
	blocked    = 15
	notUp      = 22 // no reachable authority
)

// A query is what was asked in one message, as far as it could be read.
type query struct {
	header   dnsmessage.Header
	question dnsmessage.Question
	asked    bool   // there is a question
	edns     bool   // and the reply has EDNS too
	size     int    // bytes of the longest reply that can be taken
	dnssec   bool   // the DO bit, which a reply repeats
	name     string // of the question, in lower case and without the dot at its end; not yet known to be a host's
}

// An answer is what to say to a query.
type answer struct {
	rcode dnsmessage.RCode
	addr  netip.Addr // of the type that was asked for, or none
	ttl   time.Duration
	error extendedError
}

// extendedError tells why, to clients with EDNS.
type extendedError struct {
	code uint16
	text string // empty: there is no extended error
}

// read reads a message. The rcode is that of the reply if there is nothing to
// decide; ok is false for what deserves none. Nothing of a message is
// believed: every length is that of the bytes that came.
func read(msg []byte, stream bool) (q query, rcode dnsmessage.RCode, ok bool) {
	q.size = plainSize
	if stream {
		q.size = streamSize
	}
	var p dnsmessage.Parser
	header, err := p.Start(msg)
	if err != nil {
		return q, 0, false // there is no id to reply to
	}
	q.header = header
	switch {
	case header.Response || len(msg) > queryMost:
		return q, dnsmessage.RCodeFormatError, true
	case header.OpCode != 0:
		return q, dnsmessage.RCodeNotImplemented, true
	}
	if q.question, err = p.Question(); err != nil {
		return q, dnsmessage.RCodeFormatError, true
	}
	// The question is repeated as it was asked, capitals and all: clients
	// compare it. In one that points elsewhere, two would not see the same.
	again, err := question(q.question)
	if err != nil || !bytes.HasPrefix(msg[headerSize:], again) {
		return q, dnsmessage.RCodeFormatError, true
	}
	q.asked = true
	if _, err := p.Question(); err != dnsmessage.ErrSectionDone {
		q.asked = false
		return q, dnsmessage.RCodeFormatError, true
	}
	q.name = shown(q.question.Name)
	if _, err := p.AnswerHeader(); err != dnsmessage.ErrSectionDone {
		return q, dnsmessage.RCodeFormatError, true
	}
	if _, err := p.AuthorityHeader(); err != dnsmessage.ErrSectionDone {
		return q, dnsmessage.RCodeFormatError, true
	}
	version := byte(0)
	for n := 0; ; n++ {
		h, err := p.AdditionalHeader()
		if err == dnsmessage.ErrSectionDone {
			break
		}
		if err != nil || n == moreMost || p.SkipAdditional() != nil {
			return q, dnsmessage.RCodeFormatError, true
		}
		if h.Type != dnsmessage.TypeOPT {
			continue
		}
		if q.edns || h.Name.String() != "." {
			return q, dnsmessage.RCodeFormatError, true
		}
		q.edns, q.dnssec, version = true, h.DNSSECAllowed(), byte(h.TTL>>16)
		if !stream {
			q.size = min(max(int(h.Class), plainSize), ednsSize)
		}
	}
	if version != 0 {
		return q, rcodeBadVersion, true
	}
	return q, dnsmessage.RCodeSuccess, true
}

// question returns the bytes of a question.
func question(q dnsmessage.Question) ([]byte, error) {
	b := dnsmessage.NewBuilder(nil, dnsmessage.Header{})
	if err := b.StartQuestions(); err != nil {
		return nil, err
	}
	if err := b.Question(q); err != nil {
		return nil, err
	}
	msg, err := b.Finish()
	if err != nil {
		return nil, err
	}
	return msg[headerSize:], nil
}

// reply returns the bytes of the reply to q.
func (q query) reply(a answer) ([]byte, error) {
	msg, err := q.pack(a, false)
	if err == nil && len(msg) > q.size {
		// Only the text of an extended error makes a reply this long. It is
		// left out first (RFC 8914, section 3); over TCP there is all of it.
		a.error.text = ""
		msg, err = q.pack(a, true)
	}
	if err != nil {
		return nil, fmt.Errorf("pack reply: %w", err)
	}
	return msg, nil
}

func (q query) pack(a answer, truncated bool) ([]byte, error) {
	b := dnsmessage.NewBuilder(make([]byte, 0, plainSize), dnsmessage.Header{
		ID:                 q.header.ID,
		Response:           true,
		OpCode:             q.header.OpCode,
		RecursionDesired:   q.header.RecursionDesired,
		RecursionAvailable: true,
		CheckingDisabled:   q.header.CheckingDisabled,
		Truncated:          truncated,
		RCode:              a.rcode & 15,
	})
	b.EnableCompression()
	if q.asked {
		if err := b.StartQuestions(); err != nil {
			return nil, err
		}
		if err := b.Question(q.question); err != nil {
			return nil, err
		}
	}
	if a.addr.IsValid() {
		if err := b.StartAnswers(); err != nil {
			return nil, err
		}
		h := dnsmessage.ResourceHeader{Name: q.question.Name, Class: dnsmessage.ClassINET, TTL: uint32(a.ttl / time.Second)}
		var err error
		if a.addr.Is4() {
			err = b.AResource(h, dnsmessage.AResource{A: a.addr.As4()})
		} else {
			err = b.AAAAResource(h, dnsmessage.AAAAResource{AAAA: a.addr.As16()})
		}
		if err != nil {
			return nil, err
		}
	}
	if q.edns {
		if err := b.StartAdditionals(); err != nil {
			return nil, err
		}
		var h dnsmessage.ResourceHeader
		if err := h.SetEDNS0(ednsSize, a.rcode, q.dnssec); err != nil {
			return nil, err
		}
		if err := b.OPTResource(h, dnsmessage.OPTResource{Options: a.error.options()}); err != nil {
			return nil, err
		}
	}
	return b.Finish()
}

func (e extendedError) options() []dnsmessage.Option {
	if e.text == "" {
		return nil
	}
	text := strings.ToValidUTF8(e.text[:min(len(e.text), textMost)], "")
	return []dnsmessage.Option{{Code: ednsError, Data: append([]byte{byte(e.code >> 8), byte(e.code)}, text...)}}
}

// shown returns a name in lower case, without the dot at its end, and with
// what hosts' names do not have as \DDD, so that it can be recorded.
func shown(n dnsmessage.Name) string {
	var b strings.Builder
	for _, c := range n.Data[:max(int(n.Length), 1)-1] {
		switch {
		case c >= 'A' && c <= 'Z':
			b.WriteByte(c + 'a' - 'A')
		case c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '-' || c == '_' || c == '.':
			b.WriteByte(c)
		default:
			fmt.Fprintf(&b, `\%03d`, c)
		}
	}
	return b.String()
}

// typeName returns the name of a type as DNS writes it: A, HTTPS, TYPE4711.
func typeName(t dnsmessage.Type) string {
	if name, ok := strings.CutPrefix(t.String(), "Type"); ok {
		return name
	}
	return "TYPE" + strconv.Itoa(int(t))
}

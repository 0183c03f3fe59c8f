package dns

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"golang.org/x/net/dns/dnsmessage"

	"airlock.dev/airlock/gateway/address"
)

// hangs says whether the answer for a name waits for the end of a context.
func (*world) hangs(name string) bool {
	return strings.HasSuffix(name, "undecided.test") || strings.HasPrefix(name, "slow") || strings.HasPrefix(name, "never.")
}

// Whatever comes is answered in form or not at all, and no name reaches the
// resolver that was not decided about and has one reading.
func FuzzMessage(f *testing.F) {
	for _, s := range []string{
		"1234 0100 0001 0000 0000 0000 'example.com' 0001 0001",
		"1234 0100 0001 0000 0000 0001 'ExAmple.Com' 001c 0001 00 0029 0200 00 00 8000 0006 0003 0002 6162",
		"1234 0100 0001 0000 0000 0001 'x.long.test' 0001 0001 00 0029 0200 00 00 0000 0000",
		"1234 0100 0001 0000 0000 0001 'x.attacker.test' 0041 0001 00 0029 04d0 00 01 0000 0000",
		"1234 0100 0002 0000 0000 0000 'example.com' 0001 0001 c00c 001c 0001",
		"1234 0100 0001 0000 0000 0000 c00c 0001 0001",
		"1234 0100 0001 0000 0000 0000 07 \"example\" c00a 0001 0001",
		"1234 0100 0001 0001 0001 0001 'a' 0001 0001 c00c 0001 0001 00000000 0004 01020304",
		"1234 8180 0001 0000 0000 0000 'example.com' 0001 0001",
		"1234 2900 0001 0000 0000 0000 'a b.example.com' 0001 0001",
		"1234 0100 0001 0000 0000 0000 '127.0.0.1' 0001 0001",
		"1234 0100 0001 0000 0000 0000 'a b\xff.example.com' 00ff 0001",
		"1234 0100 0001 0000 0000 0000 00 0001 0001",
	} {
		f.Add(bytesOf(f, s), false)
		f.Add(bytesOf(f, s), true)
	}
	var w world
	s := newServer(f, &w, func(c *Config) { c.Rate = 1 << 40; c.Known = 10 })
	f.Fuzz(func(t *testing.T, msg []byte, stream bool) {
		q, rcode, ok := read(msg, stream)
		if !ok {
			if len(msg) >= headerSize {
				t.Fatal("no reply to a whole header")
			}
			return
		}
		a, done := s.atOnce(q, rcode)
		if !done {
			if w.hangs(q.name) {
				return
			}
			a = s.resolve(t.Context(), q)
		}
		judged, looked := w.saw()
		if len(judged) > 1 || done != (len(judged) == 0) {
			t.Fatalf("decided at once: %v, and judged %q", done, judged)
		}
		for _, name := range looked {
			h, err := address.Parse(name)
			if err != nil || h.Name() != name || !slices.Equal(judged, []string{name + " A"}) && !slices.Equal(judged, []string{name + " AAAA"}) {
				t.Fatalf("looked up %q, judged %q", name, judged)
			}
		}
		reply, err := q.reply(a)
		if err != nil {
			t.Fatal(err)
		}
		if limit := q.size; len(reply) > limit || !stream && len(reply) > ednsSize || !q.edns && len(reply) > plainSize {
			t.Fatalf("a reply of %d bytes", len(reply))
		}
		var m dnsmessage.Message
		if err := m.Unpack(reply); err != nil {
			t.Fatalf("% x: %v", reply, err)
		}
		if m.ID != q.header.ID || !m.Response || m.OpCode != q.header.OpCode || m.Authoritative || m.AuthenticData || len(m.Authorities) != 0 || len(m.Answers) > 1 || len(m.Additionals) > 1 {
			t.Fatalf("%+v", m)
		}
		if len(m.Questions) == 1 {
			asked, err := question(m.Questions[0])
			if err != nil || !bytes.Equal(reply[headerSize:headerSize+len(asked)], asked) || !bytes.HasPrefix(msg[headerSize:], asked) {
				t.Fatalf("the question is\n% x in\n% x: %v", asked, msg, err)
			}
		} else if m.RCode == dnsmessage.RCodeSuccess {
			t.Fatalf("success without a question: %+v", m)
		}
		for _, r := range m.Answers {
			if r.Header.Name != m.Questions[0].Name || r.Header.Type != m.Questions[0].Type || m.RCode != dnsmessage.RCodeSuccess || len(looked) > 1 {
				t.Fatalf("answer %+v to %+v", r, m.Questions)
			}
		}
	})
}

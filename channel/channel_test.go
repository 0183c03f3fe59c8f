package channel

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"airlock.dev/airlock"
	"golang.org/x/sys/unix"
)

// pair is a packet connection with deadlines on both ends.
func pair(t testing.TB) (host, guest *os.File) {
	t.Helper()
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	host, guest = os.NewFile(uintptr(p[0]), "host"), os.NewFile(uintptr(p[1]), "guest")
	t.Cleanup(func() { host.Close(); guest.Close() })
	return host, guest
}

func ctx(t testing.TB) context.Context {
	c, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return c
}

// session joins a host and a guest that serves with handle.
func session(t *testing.T, handle Handler) *Mux {
	t.Helper()
	hc, gc := pair(t)
	served := make(chan error, 1)
	go func() { served <- Serve(gc, handle) }()
	m, err := Dial(ctx(t), hc, 1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		m.Close()
		select {
		case <-served:
		case <-time.After(10 * time.Second):
			t.Error("the guest serves on after the end of the connection")
		}
	})
	return m
}

// echo sends back what it gets.
func echo(ctx context.Context, s *Stream, method string, req []byte) error {
	if method == "fail" {
		return &airlock.Error{Code: airlock.NotFound, Message: "no", Hint: "look", Err: errors.New("hidden")}
	}
	if err := s.Send(ctx, TagReply, req); err != nil {
		return err
	}
	for {
		tag, body, err := s.Recv(ctx)
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if err := s.Send(ctx, tag, body); err != nil {
			return err
		}
	}
}

func TestMessagesOfAllSizes(t *testing.T) {
	m := session(t, echo)
	s, err := m.Open(ctx(t), "echo", "hi")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if tag, body, err := s.Recv(ctx(t)); tag != TagReply || string(body) != `"hi"` || err != nil {
		t.Fatalf("reply %c %q %v", tag, body, err)
	}
	for _, n := range []int{0, 1, MaxPayload - 1, MaxPayload, MaxPayload + 1, MaxMessage - 1, MaxMessage} {
		want := bytes.Repeat([]byte{0xff, 0, byte(n)}, n/3+1)[:n]
		if err := s.Send(ctx(t), 'x', want); err != nil {
			t.Fatal(n, err)
		}
		if tag, got, err := s.Recv(ctx(t)); tag != 'x' || !bytes.Equal(got, want) || err != nil {
			t.Errorf("a message of %d bytes came back with %d, tag %c, %v", n, len(got), tag, err)
		}
	}
	if err := s.Send(ctx(t), 'x', make([]byte, MaxMessage+1)); airlock.CodeOf(err) != airlock.TooLarge {
		t.Errorf("a message too long gave %v", err)
	}
	s.CloseSend()
	if _, _, err := s.Recv(ctx(t)); err != io.EOF {
		t.Errorf("after the end: %v", err)
	}
}

func TestResetCarriesThePublicReason(t *testing.T) {
	m := session(t, echo)
	_, err := Call[string](ctx(t), m, "fail", Empty{})
	if airlock.CodeOf(err) != airlock.NotFound || err.Error() != "no: look" {
		t.Errorf("%v %q", airlock.CodeOf(err), err)
	}
}

func TestBackPressure(t *testing.T) {
	sent := make(chan int, 1<<16)
	m := session(t, func(ctx context.Context, s *Stream, method string, req []byte) error {
		for i := range 1000 {
			if err := s.Send(ctx, 'x', make([]byte, MaxPayload)); err != nil {
				return err
			}
			sent <- i
		}
		return nil
	})
	s, err := m.Open(ctx(t), "x", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	time.Sleep(200 * time.Millisecond)
	if n := len(sent); n != 3 { // what a window of 512 KiB takes
		t.Errorf("%d packets were sent to a reader that does not read, want 3", n)
	}
	// Another stream goes on meanwhile.
	o, err := m.Open(ctx(t), "y", nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := o.Recv(ctx(t)); err != nil {
		t.Error(err)
	}
	o.Close()
	n := 0
	for {
		_, body, err := s.Recv(ctx(t))
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		n += len(body)
	}
	if n != 1000*MaxPayload {
		t.Errorf("%d bytes arrived, want %d", n, 1000*MaxPayload)
	}
}

func TestManyStreams(t *testing.T) {
	m := session(t, echo)
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			want := strings.Repeat(string(rune('a'+i%26)), 1000+i*100)
			got, err := Call[string](ctx(t), m, "echo", want)
			if err != nil || got != want {
				t.Errorf("call %d: %d bytes, %v", i, len(got), err)
			}
		})
	}
	wg.Wait()
	var open []*Stream
	for range maxStreams {
		s, err := m.Open(ctx(t), "echo", nil)
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, s)
	}
	if _, err := m.Open(ctx(t), "echo", nil); airlock.CodeOf(err) != airlock.Exhausted {
		t.Errorf("one stream too many gave %v", err)
	}
	for _, s := range open {
		s.Close()
	}
	if _, err := Call[Empty](ctx(t), m, "echo", Empty{}); err != nil {
		t.Errorf("after all were closed: %v", err)
	}
}

func TestEpochDropsStreams(t *testing.T) {
	hc, gc := pair(t)
	ended := make(chan error, 1)
	go Serve(gc, func(ctx context.Context, s *Stream, method string, req []byte) error {
		if method != "hang" {
			return SendReply(ctx, s, Empty{})
		}
		for { // talks until the host is replaced, without anyone reading
			if err := s.Send(ctx, 'x', make([]byte, 100)); err != nil {
				ended <- err
				return err
			}
		}
	})
	raw := func(k kind, stream uint32, payload ...byte) {
		p := binary.BigEndian.AppendUint32([]byte{byte(k), 0, 0, 0}, stream)
		if _, err := hc.Write(append(p, payload...)); err != nil {
			t.Fatal(err)
		}
	}
	raw(kindEpoch, 0, 0, 0, 0, 0, 0, 0, 0, 1)
	raw(kindOpen, 1, []byte("hang")...)
	raw(kindData, 1, 'n')
	time.Sleep(50 * time.Millisecond) // the socket is full of an old stream's packets
	m, err := Dial(ctx(t), hc, 2)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	select {
	case err := <-ended:
		if airlock.CodeOf(err) != airlock.Canceled {
			t.Errorf("the old stream ended with %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the old stream lives")
	}
	for range 3 { // ids begin anew; nothing of the old stream is in the way
		if _, err := Call[Empty](ctx(t), m, "new", Empty{}); err != nil {
			t.Error(err)
		}
	}
}

func TestDialEndsWithItsContext(t *testing.T) {
	hc, _ := pair(t)
	c, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := Dial(c, hc, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a guest that does not answer gave %v", err)
	}
}

// packet makes one as a guest would.
func packet(k kind, flags byte, stream uint32, payload []byte) []byte {
	p := binary.BigEndian.AppendUint32([]byte{byte(k), flags, 0, 0}, stream)
	return append(p, payload...)
}

// hostile answers the epoch and returns a session with one open stream.
func hostile(t testing.TB) (*Mux, *Stream, *os.File) {
	t.Helper()
	hc, gc := pair(t)
	go func() {
		buf := make([]byte, MaxPacket)
		if n, err := gc.Read(buf); err == nil && n == 16 {
			gc.Write(packet(kindEpochAck, 0, 0, buf[8:16]))
		}
	}()
	m, err := Dial(ctx(t), hc, 5)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	s, err := m.Open(ctx(t), "x", nil)
	if err != nil {
		t.Fatal(err)
	}
	return m, s, gc
}

func TestHostilePeerIsCut(t *testing.T) {
	full := make([]byte, MaxPayload)
	repeat := func(n int, p []byte) (all [][]byte) {
		for range n {
			all = append(all, p)
		}
		return all
	}
	for name, packets := range map[string][][]byte{
		"short":              {{1, 2, 3}},
		"unknown kind":       {packet(99, 0, 1, nil)},
		"unknown flag":       {packet(kindData, 2, 1, nil)},
		"epoch to the host":  {packet(kindEpoch, 0, 0, make([]byte, 8))},
		"second ack":         {packet(kindEpochAck, 0, 0, make([]byte, 8))},
		"open by the guest":  {packet(kindOpen, 0, 2, []byte("x"))},
		"unknown stream":     {packet(kindData, 0, 7, nil)},
		"more than credit":   repeat(33, packet(kindData, 0, 1, full)),
		"empty over credit":  repeat(window/frameCost+1, packet(kindData, 0, 1, nil)),
		"endless message":    repeat(17, packet(kindData, flagMore, 1, full)),
		"credit of nothing":  {packet(kindCredit, 0, 1, make([]byte, 4))},
		"credit out of form": {packet(kindCredit, 0, 1, make([]byte, 3))},
		"too much credit":    {packet(kindCredit, 0, 1, []byte{0, 0x20, 0, 0})},
		"huge credit":        {packet(kindCredit, 0, 1, []byte{255, 255, 255, 255})},
		"data after the end": {packet(kindEnd, 0, 1, nil), packet(kindData, 0, 1, nil)},
	} {
		t.Run(name, func(t *testing.T) {
			m, s, gc := hostile(t)
			for _, p := range packets {
				if _, err := gc.Write(p); err != nil {
					break // cut already
				}
			}
			select {
			case <-m.Done():
			case <-time.After(5 * time.Second):
				t.Fatal("the session goes on")
			}
			for { // what was queued is still read, then the end
				if _, _, err := s.Recv(ctx(t)); err != nil {
					if airlock.CodeOf(err) != airlock.Gone && err != io.EOF {
						t.Errorf("the stream ended with %v", err)
					}
					break
				}
			}
		})
	}
}

func TestLatePacketsOfAClosedStreamAreDropped(t *testing.T) {
	m, s, gc := hostile(t)
	s.Close()
	gc.Write(packet(kindData, 0, 1, []byte("late")))
	gc.Write(packet(kindReset, 0, 1, []byte("not json")))
	select {
	case <-m.Done():
		t.Error("the session ended")
	case <-time.After(100 * time.Millisecond):
	}
}

func FuzzParseFrame(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0, 0, 0, 0, 0, 1})
	f.Add(packet(kindData, flagMore, 1, []byte("x")))
	f.Fuzz(func(t *testing.T, b []byte) {
		fr, err := parseFrame(b)
		if err == nil && (len(fr.payload) > MaxPayload || len(fr.payload) != len(b)-headerSize) {
			t.Errorf("payload of %d bytes of a packet of %d", len(fr.payload), len(b))
		}
	})
}

// FuzzHost feeds a host with what a hostile guest might say: packets, each
// after a byte that is its length. It must neither panic nor hang.
func FuzzHost(f *testing.F) {
	seed := func(packets ...[]byte) {
		var b []byte
		for _, p := range packets {
			b = append(append(b, byte(len(p))), p...)
		}
		f.Add(b)
	}
	seed(packet(kindData, 0, 1, []byte(`{"x":1}`)), packet(kindEnd, 0, 1, nil))
	seed(packet(kindReset, 0, 1, []byte(`{"code":"internal","message":"x"}`)))
	seed(packet(kindData, flagMore, 1, []byte(`{"`)), packet(kindData, 0, 1, []byte(`x":1}`)), packet(kindCredit, 0, 1, []byte{0, 0, 0, 1}))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, s, gc := hostile(t)
		for len(b) > 1 {
			n := min(int(b[0]), len(b)-1)
			if n > 0 {
				if _, err := gc.Write(b[1 : 1+n]); err != nil {
					break
				}
			}
			b = b[1+n:]
		}
		gc.Close()
		c, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		for {
			if _, err := RecvReply[map[string]any](c, s, "x"); err != nil && airlock.CodeOf(err) != airlock.Internal {
				if c.Err() != nil {
					t.Fatal("the host hangs")
				}
				break
			} else if err != nil && errors.Is(err, io.ErrUnexpectedEOF) {
				break
			}
			select {
			case <-m.Done():
				if _, _, err := s.Recv(c); err != nil {
					return
				}
			default:
			}
		}
	})
}

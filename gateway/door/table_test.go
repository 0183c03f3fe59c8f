package door

import (
	"context"
	"errors"
	"io"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Who waits for an answer when the process of a door dies is told by the next one
// that there will be none.
func TestFlowsOfTheDoorBefore(t *testing.T) {
	list, err := NewTableFile()
	if err != nil {
		t.Fatal(err)
	}
	defer list.Close()
	table := func() *Table {
		t.Helper()
		table, err := OpenTable(list)
		if err != nil {
			t.Fatal(err)
		}
		return table
	}
	ours, end := pair(t)
	defer end.Close()
	again, err := unix.Dup(int(ours.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	unix.SetNonblock(again, true)
	silent := func(ctx context.Context, f *Flow) {
		c, err := f.Accept()
		if err != nil {
			return
		}
		io.Copy(io.Discard, c)
	}
	first, err := Open(ours, Config{Flows: table()}, handler{tcp: silent})
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	g := newGuest(t, end)
	over := g.mustDial(t, "192.0.2.9:80")
	over.Close()
	var waiting []interface {
		io.ReadWriteCloser
		SetDeadline(time.Time) error
	}
	for _, to := range []string{"192.0.2.1:443", "192.0.2.1:443", "198.18.0.7:80", "[2001:db8::1]:443"} {
		c := g.mustDial(t, to)
		if _, err := io.WriteString(c, "a question"); err != nil {
			t.Fatal(err)
		}
		waiting = append(waiting, c)
	}
	for first.Stats().Flows != len(waiting) {
		time.Sleep(time.Millisecond)
	}
	first.link.conn.Close() // as if it had died: it says nothing any more

	second, err := Open(os.NewFile(uintptr(again), "door"), Config{Flows: table()}, handler{tcp: echo})
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	for i, c := range waiting {
		c.SetDeadline(time.Now().Add(20 * time.Second))
		if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("connection %d: %v", i, err)
		} else if text := reason(err); !errors.Is(text, syscall.ECONNRESET) {
			t.Errorf("connection %d: %v", i, text)
		}
	}
	c := g.mustDial(t, "192.0.2.1:443")
	io.WriteString(c, "x")
	if n, err := c.Read(make([]byte, 1)); n != 1 {
		t.Errorf("a new connection: %v", err)
	}
}

func TestTable(t *testing.T) {
	list, err := NewTableFile()
	if err != nil {
		t.Fatal(err)
	}
	defer list.Close()
	if err := list.Truncate(1); err == nil {
		t.Error("the memory can be made smaller under who uses it")
	}
	first, err := OpenTable(list)
	if err != nil {
		t.Fatal(err)
	}
	at := netip.MustParseAddrPort
	four, six := ends{at("10.0.0.2:40000"), at("192.0.2.1:443")}, ends{at("[fd61:6972::2]:1"), at("[2001:db8::1]:65535")}
	first.add(four.from, four.to)
	gone := first.add(at("10.0.0.2:2"), at("192.0.2.1:2"))
	first.add(six.from, six.to)
	first.remove(gone)
	second, err := OpenTable(list)
	if err != nil {
		t.Fatal(err)
	}
	if want := []ends{six, four}; !slices.Equal(second.left, want) {
		t.Errorf("left are %v, want %v", second.left, want)
	}
	for range slotsMost {
		if second.add(four.from, four.to) < 0 {
			t.Fatal("it is full too early")
		}
	}
	if second.add(four.from, four.to) >= 0 {
		t.Error("it has more than it has room for")
	}
	first.close()
	first.remove(0) // of a flow that ends late
	if first.add(four.from, four.to) >= 0 {
		t.Error("it is closed")
	}

	if _, err := list.WriteAt(slices.Repeat([]byte{0xff}, TableBytes), 0); err != nil {
		t.Fatal(err)
	}
	if odd, err := OpenTable(list); err != nil || len(odd.left) != slotsMost {
		t.Errorf("whatever is there is read: %v", err)
	}
	short, err := os.Create(t.TempDir() + "/short")
	if err != nil {
		t.Fatal(err)
	}
	defer short.Close()
	if _, err := OpenTable(short); err == nil {
		t.Error("a list of another size")
	}
	var none *Table
	none.remove(none.add(four.from, four.to))
	none.close()
}

package main

import (
	"net"
	"testing"
)

func TestPublicDomain(t *testing.T) {
	for _, c := range []struct {
		domain string
		port   int
		want   string
	}{
		{"", 3000, ""},
		{"box.test", 8443, "box.test:8443"},
		{"box.test", 443, "box.test"},
		{"box.test:443", 8443, "box.test"}, // behind something that listens there
		{"box.test:9443", 8443, "box.test:9443"},
	} {
		if got := publicDomain(c.domain, &net.TCPAddr{Port: c.port}); got != c.want {
			t.Errorf("%s on %d: %q, want %q", c.domain, c.port, got, c.want)
		}
	}
}

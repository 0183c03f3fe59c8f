package api

import (
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net"
	"strconv"

	"airlock.dev/airlock"
	"airlock.dev/airlock/policy"
)

// Bounds of network.egressProxy, in bytes; all are E2B's.
const (
	maxProxyCredential = 255 // RFC 1929
	maxProxyName       = 253
	maxProxyCA         = 8192
)

// proxyBody is a SOCKS5 proxy, in requests and in replies.
type proxyBody struct {
	Address  string        `json:"address"`
	Username string        `json:"username,omitempty"`
	Password string        `json:"password,omitempty"` // never in replies
	TLS      *proxyTLSBody `json:"tls,omitempty"`
}

type proxyTLSBody struct {
	Enabled    bool   `json:"enabled"`
	ServerName string `json:"serverName,omitempty"`
	CACert     string `json:"caCert,omitempty"` // never in replies
}

// proxy reads network.egressProxy. No error has a part of a credential in it.
func (b *proxyBody) proxy() (*airlock.EgressProxy, error) {
	const field = "network.egressProxy"
	if b == nil {
		return nil, nil
	}
	host, port, err := net.SplitHostPort(b.Address)
	number, portErr := strconv.ParseUint(port, 10, 16)
	name, nameErr := policy.HostName(host)
	if err != nil || portErr != nil || number == 0 || nameErr != nil {
		// Who wrote a URL may have written a password.
		return nil, airlock.Invalidf(field+".address", "give a host and a port such as proxy.example.com:1080", "%s.address is not the address of a SOCKS5 proxy", field)
	}
	p := &airlock.EgressProxy{Host: name, Port: uint16(number), Username: b.Username, Password: b.Password}
	switch {
	case len(b.Username) > maxProxyCredential:
		return nil, airlock.Invalidf(field+".username", fmt.Sprintf("use at most %d", maxProxyCredential), "%s.username has %d bytes", field, len(b.Username))
	case len(b.Password) > maxProxyCredential:
		return nil, airlock.Invalidf(field+".password", fmt.Sprintf("use at most %d", maxProxyCredential), "%s.password has %d bytes", field, len(b.Password))
	case b.Username == "" && b.Password != "":
		return nil, airlock.Invalidf(field+".password", "give both or none", "%s has a password and no username", field)
	case b.Username == hiddenValue:
		return nil, airlock.Invalidf(field+".username", "give the name itself, and the password: replies do not have them", "%s.username is %q", field, hiddenValue)
	}
	if b.TLS == nil {
		return p, nil
	}
	if !b.TLS.Enabled {
		if b.TLS.ServerName != "" || b.TLS.CACert != "" {
			return nil, airlock.Invalidf(field+".tls", "enable it, or leave out the rest", "%s.tls is not enabled and says how", field)
		}
		return p, nil
	}
	p.TLS, p.CACert = true, b.TLS.CACert
	if b.TLS.ServerName != "" {
		p.ServerName, err = policy.HostName(b.TLS.ServerName)
		if err != nil || len(b.TLS.ServerName) > maxProxyName {
			return nil, airlock.Invalidf(field+".tls.serverName", "give a name such as proxy.example.com", "%s.tls.serverName is %.60q", field, b.TLS.ServerName)
		}
	}
	if len(p.CACert) > maxProxyCA {
		return nil, airlock.Invalidf(field+".tls.caCert", fmt.Sprintf("use at most %d", maxProxyCA), "%s.tls.caCert has %d bytes", field, len(p.CACert))
	}
	if p.CACert != "" && !certificates([]byte(p.CACert)) {
		return nil, airlock.Invalidf(field+".tls.caCert", "give one or more certificates in PEM", "%s.tls.caCert is no list of certificates", field)
	}
	return p, nil
}

// certificates says whether text is certificates in PEM, and nothing else in PEM:
// a key would be kept for nothing.
func certificates(text []byte) bool {
	for n := 0; ; n++ {
		block, rest := pem.Decode(text)
		if block == nil {
			return n > 0
		}
		if _, err := x509.ParseCertificate(block.Bytes); block.Type != "CERTIFICATE" || err != nil {
			return false
		}
		text = rest
	}
}

// hiddenProxy is what replies have of a proxy.
func hiddenProxy(p *airlock.EgressProxy) *proxyBody {
	if p == nil {
		return nil
	}
	b := &proxyBody{Address: net.JoinHostPort(p.Host, strconv.Itoa(int(p.Port)))}
	if p.Username != "" {
		b.Username = hiddenValue
	}
	if p.TLS {
		b.TLS = &proxyTLSBody{Enabled: true, ServerName: p.ServerName}
	}
	return b
}

package image

import (
	"bytes"
	"crypto/sha1"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"software.sslmate.com/src/go-pkcs12"

	"airlock.dev/airlock"
)

// Trust is what the clients in an image trust: these roots, in every store
// that there is, and none of the machine's own. So a connection that does not
// end at the gateway cannot be a good one.
type Trust struct {
	PEM []byte // one certificate or more
	ID  string // names them; told in Image
}

const (
	certsDir  = "/etc/ssl/certs"
	bundle    = certsDir + "/ca-certificates.crt"
	javaStore = certsDir + "/java/cacerts"
	trustDir  = guestDir + "/trust" // has what is laid over files of /usr
)

// etcStores are the directories of /etc in which systems keep roots. With a
// Trust nothing of them is copied.
var etcStores = []string{certsDir, "/etc/ca-certificates/extracted", "/etc/ca-certificates/trust-source", "/etc/pki/ca-trust", "/etc/pki/java", "/etc/pki/tls/certs"}

// The bundles that clients look for beside the first, by their system, and the
// stores of Java. The directories of p11-kit, in /usr, are read by GnuTLS and NSS.
var (
	bundles    = []string{bundle, "/etc/ssl/cert.pem", "/etc/ssl/ca-bundle.pem"}
	pkiBundles = []string{"/etc/pki/tls/certs/ca-bundle.crt", "/etc/pki/tls/certs/ca-bundle.trust.crt", "/etc/pki/tls/cert.pem", "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem"}
	pkiJava    = []string{"/etc/pki/ca-trust/extracted/java/cacerts", "/etc/pki/java/cacerts"}
	p11Dirs    = []string{"/usr/share/pki/ca-trust-source", "/usr/share/pki/trust", "/usr/share/ca-certificates/trust-source"}
)

// pythonStores and javaStores are where packages have a store of their own in
// /usr. The patterns are as deep as such packages are, and no deeper: a
// toolchain has many files.
var (
	pythonDirs   = []string{"/usr/lib/python3*", "/usr/lib64/python3*", "/usr/local/lib/python3*", "/usr/local/lib64/python3*"}
	pythonStores = []string{"*-packages/*/cacert.pem", "*-packages/*/*/certifi/cacert.pem", "*-packages/*/*/requests/cacert.pem", "*-packages/grpc/_cython/_credentials/roots.pem"}
	javaDirs     = []string{"/usr/lib/jvm/*", "/usr/lib64/jvm/*", "/usr/java/*", "/usr/local/*j[dr][ek]*", "/usr/local/lib/jvm/*"}
	javaStores   = []string{"lib/security/cacerts", "jre/lib/security/cacerts"}
)

// trustEnv makes clients trust the bundle that have roots built in, or look
// for a store by a variable only. The first one is that of OpenSSL, Go, Ruby,
// and Rust's clients such as uv.
var trustEnv = map[string]string{
	"SSL_CERT_FILE": bundle, "SSL_CERT_DIR": certsDir, "NIX_SSL_CERT_FILE": bundle,
	"CURL_CA_BUNDLE": bundle, "GIT_SSL_CAINFO": bundle,
	"REQUESTS_CA_BUNDLE": bundle, "PIP_CERT": bundle, "HTTPLIB2_CA_CERTS": bundle, "WEBSOCKET_CLIENT_CA_BUNDLE": bundle,
	"NODE_EXTRA_CA_CERTS": bundle, "DENO_TLS_CA_STORE": "system",
	"CARGO_HTTP_CAINFO": bundle,
	"AWS_CA_BUNDLE":     bundle, "CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE": bundle,
	"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": bundle,
}

// certificates reads the roots of a Trust.
func (t Trust) certificates() ([]*x509.Certificate, error) {
	var roots []*x509.Certificate
	for text := t.PEM; len(bytes.TrimSpace(text)) > 0; {
		b, rest := pem.Decode(text)
		if b == nil || b.Type != "CERTIFICATE" {
			return nil, airlock.Invalidf("trust", "give certificates in PEM only", "what the image is to trust is no list of certificates")
		}
		cert, err := x509.ParseCertificate(b.Bytes)
		if err != nil {
			return nil, airlock.Invalidf("trust", "give certificates in PEM only", "a certificate that the image is to trust is damaged").Because(err)
		}
		roots = append(roots, cert)
		text = rest
	}
	return roots, nil
}

// trust makes all stores of the image ours. It comes after /etc and /usr.
func (b *builder) trust(roots []*x509.Certificate) {
	if b.err != nil || len(roots) == 0 {
		return
	}
	var all []byte
	var entries []pkcs12.TrustStoreEntry
	for i, cert := range roots {
		text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw})
		all = append(all, text...)
		name := fmt.Sprintf("airlock-gateway-%d", i+1)
		entries = append(entries, pkcs12.TrustStoreEntry{Cert: cert, FriendlyName: name})
		b.store(path.Join(certsDir, name+".pem"), text)
		b.hashed(name+".pem", cert)
	}
	// Java opens its store with no password, and could not if it were encrypted.
	java, err := pkcs12.Passwordless.EncodeTrustStoreEntries(entries, "")
	b.do(err)
	files := map[string][]byte{javaStore: java, path.Join(trustDir, "bundle.pem"): all, path.Join(trustDir, "cacerts"): java, path.Join(trustDir, "p11/anchors/airlock.pem"): all}
	for _, p := range bundles {
		files[p] = all
	}
	if _, err := os.Stat("/etc/pki"); err == nil {
		for _, p := range pkiBundles {
			files[p] = all
		}
		for _, p := range pkiJava {
			files[p] = java
		}
	}
	for p, data := range files {
		b.store(p, data)
	}
	for _, p := range find(pythonDirs, pythonStores) {
		b.replace(p, "bundle.pem", all)
	}
	for _, p := range find(javaDirs, javaStores) {
		b.replace(p, "cacerts", java)
	}
	for _, p := range p11Dirs {
		if info, err := os.Stat(b.path(p)); err == nil && info.IsDir() {
			b.bind(path.Join(trustDir, "p11"), p)
		}
	}
}

// store writes a file of ours in place of what is there. No link of the image
// leads it out of the image.
func (b *builder) store(p string, data []byte) {
	if b.err != nil {
		return
	}
	root, err := os.OpenRoot(b.root)
	if err != nil {
		b.do(err)
		return
	}
	defer root.Close()
	p = strings.TrimPrefix(p, "/")
	for i, c := range p {
		if c != '/' {
			continue
		}
		if err := root.Mkdir(p[:i], 0o755); err == nil {
			b.do(root.Lchown(p[:i], b.uid, b.uid))
		} else if !errors.Is(err, fs.ErrExist) {
			b.do(err)
			return
		}
	}
	if err := root.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
		b.do(err)
		return
	}
	b.do(root.WriteFile(p, data, 0o644))
	b.do(root.Lchown(p, b.uid, b.uid))
	b.do(root.Chmod(p, 0o644))
}

// find returns the files, or links to files, that are at one of the names below one of the directories.
func find(dirs, names []string) []string {
	var found []string
	for _, dir := range dirs {
		for _, name := range names {
			matches, err := filepath.Glob(path.Join(dir, name))
			if err == nil { // the patterns are good
				found = append(found, matches...)
			}
		}
	}
	return found
}

// replace puts data where the machine has the store p, at the end of its
// links: in /usr, which is shown, a file of trustDir is laid over it.
func (b *builder) replace(p, over string, data []byte) {
	end, err := filepath.EvalSymlinks(p)
	if err != nil || b.err != nil {
		return // a link to nothing
	}
	switch {
	case strings.HasPrefix(end, "/etc/"):
		b.store(end, data)
	case strings.HasPrefix(end, "/usr/") && !slices.Contains(b.covered, end):
		info, err := os.Lstat(b.path(end))
		if err != nil || !info.Mode().IsRegular() {
			return // it is on another file system, which the image does not show
		}
		b.covered = append(b.covered, end)
		b.bind(path.Join(trustDir, over), end)
	}
}

// hashed makes the link by which OpenSSL finds a certificate in a directory.
func (b *builder) hashed(name string, cert *x509.Certificate) {
	hash, err := nameHash(cert.RawSubject)
	b.do(err)
	for i := 0; b.err == nil; i++ {
		p := fmt.Sprintf("%s/%08x.%d", certsDir, hash, i)
		if _, err := os.Lstat(b.path(p)); errors.Is(err, fs.ErrNotExist) {
			b.symlink(name, p)
			return
		}
	}
}

// nameHash is OpenSSL's hash of a name: the first four bytes, the lowest
// first, of the SHA-1 of its parts in a canonical form, without what encloses
// them. In that form texts are in UTF-8, in lower case (of ASCII only), and
// spaces are single.
func nameHash(raw []byte) (uint32, error) {
	var name pkix.RDNSequence
	if rest, err := asn1.Unmarshal(raw, &name); err != nil || len(rest) > 0 {
		return 0, errors.New("the name of a certificate is damaged")
	}
	h := sha1.New()
	for _, rdn := range name {
		type attribute struct {
			Type  asn1.ObjectIdentifier
			Value string `asn1:"utf8"`
		}
		var parts []attribute
		for _, a := range rdn {
			text, ok := a.Value.(string)
			if !ok {
				return 0, fmt.Errorf("the name of a certificate has a %v that is no text", a.Type)
			}
			lower := strings.Map(func(c rune) rune {
				if 'A' <= c && c <= 'Z' {
					c += 'a' - 'A'
				}
				return c
			}, text)
			parts = append(parts, attribute{a.Type, strings.Join(strings.Fields(lower), " ")})
		}
		der, err := asn1.MarshalWithParams(parts, "set")
		if err != nil {
			return 0, err
		}
		h.Write(der)
	}
	return binary.LittleEndian.Uint32(h.Sum(nil)), nil
}

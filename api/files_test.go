package api_test

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"strings"
	"testing"

	"airlock.dev/airlock/channel"
	"github.com/google/go-cmp/cmp"
)

func TestMetadata(t *testing.T) {
	w := newWorld(t)
	id, token := w.create(`{"templateID":"base"}`)
	box := w.driver.box(id)
	const (
		kept = `[{"name":"f","path":"/f","type":"file","metadata":%s}]`
		bad  = `{"code":400,"message":"%s"}`
	)
	long := strings.Repeat("k", channel.MaxMetadataKey)
	full := strings.Repeat("v", channel.MaxMetadata-len(channel.MetadataPrefix)-1)
	for _, c := range []struct {
		what   string
		header []string
		status int
		reply  string
		want   map[string]string
	}{
		{"none", nil, 200, `[{"name":"f","path":"/f","type":"file"}]`, nil},
		{"keys in lower case", []string{"X-Metadata-Author", "Ann", "x-metadata-TWO", "b c"}, 200, fmt.Sprintf(kept, `{"author":"Ann","two":"b c"}`), map[string]string{"author": "Ann", "two": "b c"}},
		{"empty value", []string{"X-Metadata-A", ""}, 200, fmt.Sprintf(kept, `{"a":""}`), map[string]string{"a": ""}},
		{"all that may be in a key", []string{"X-Metadata-!#$%&'*+-.^_`|~9", "~ !"}, 200, fmt.Sprintf(kept, "{\"!#$%\\u0026'*+-.^_`|~9\":\"~ !\"}"), map[string]string{"!#$%&'*+-.^_`|~9": "~ !"}},
		{"the longest key", []string{"X-Metadata-" + long, "v"}, 200, fmt.Sprintf(kept, `{"`+long+`":"v"}`), map[string]string{long: "v"}},
		{"a longer key", []string{"X-Metadata-k" + long, "v"}, 400, fmt.Sprintf(bad, `the name of the header X-Metadata-Kk`+strings.Repeat("k", 87)+` is too short or too long: use 1 to 246 characters behind X-Metadata-`), nil},
		{"no key", []string{"X-Metadata-", "v"}, 400, fmt.Sprintf(bad, `the name of the header X-Metadata- is too short or too long: use 1 to 246 characters behind X-Metadata-`), nil},
		{"a value that is no ASCII", []string{"X-Metadata-A", "é"}, 400, fmt.Sprintf(bad, `the header X-Metadata-A has characters that are not possible in metadata: use printable ASCII`), nil},
		{"a value with a tab", []string{"X-Metadata-A", "a\tb"}, 400, fmt.Sprintf(bad, `the header X-Metadata-A has characters that are not possible in metadata: use printable ASCII`), nil},
		{"all that fits", []string{"X-Metadata-A", full}, 200, fmt.Sprintf(kept, `{"a":"`+full+`"}`), map[string]string{"a": full}},
		{"a byte more", []string{"X-Metadata-A", full + "v"}, 400, fmt.Sprintf(bad, `with the header X-Metadata-A the metadata is too long: keep keys, with 9 bytes more for each, and values within 4096 bytes`), nil},
		{"too much together", []string{"X-Metadata-A", full, "X-Metadata-B", ""}, 400, fmt.Sprintf(bad, `with the header X-Metadata-B the metadata is too long: keep keys, with 9 bytes more for each, and values within 4096 bytes`), nil},
	} {
		box.mu.Lock()
		clear(box.files)
		box.mu.Unlock()
		r := w.do("POST", "/files?path=/f", "x", address(id, token, append([]string{"Content-Type", "application/octet-stream"}, c.header...)...)...)
		r.want(t, c.what, c.status, c.reply)
		box.mu.Lock()
		if _, written := box.files["/f"]; written != (c.status == 200) {
			t.Errorf("%s: written: %v", c.what, written)
		}
		if c.status == 200 && !maps.Equal(box.lastUp.Metadata, c.want) {
			t.Errorf("%s: the guest was told %v", c.what, box.lastUp.Metadata)
		}
		box.mu.Unlock()
	}
	form := multipartBody(`form-data; name="file"; filename="/1"`, "i", `form-data; name="file"; filename="/2"`, "ii")
	w.do("POST", "/files", form, address(id, token, "Content-Type", "multipart/form-data; boundary=XX", "X-Metadata-A", "b")...).
		want(t, "each file of a form", 200, `[{"name":"1","path":"/1","type":"file","metadata":{"a":"b"}},{"name":"2","path":"/2","type":"file","metadata":{"a":"b"}}]`)
	var many strings.Builder
	for i := range 1200 {
		fmt.Fprintf(&many, "--XX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"/many/%d\"\r\n\r\n\r\n", i)
	}
	w.do("POST", "/files", many.String()+"--XX--\r\n", address(id, token, "Content-Type", "multipart/form-data; boundary=XX", "X-Metadata-A", full)...).
		want(t, "much metadata of many files", 413, `{"code":413,"message":"the names and metadata of the files are longer than 4194304 bytes together: send the rest in another request"}`)
}

func TestManyParts(t *testing.T) {
	w := newWorld(t)
	id, token := w.create(`{"templateID":"base"}`)
	body := strings.Repeat("--XX\r\nContent-Disposition: form-data; name=\"x\"\r\n\r\n\r\n", 10_001) + "--XX--\r\n"
	w.do("POST", "/files", body, address(id, token, "Content-Type", "multipart/form-data; boundary=XX")...).
		want(t, "parts", 413, `{"code":413,"message":"the body has more than 10000 parts"}`)
}

// TestBadPaths: what is no UTF-8 would be another name inside.
func TestBadPaths(t *testing.T) {
	w := newWorld(t)
	id, token := w.create(`{"templateID":"base"}`)
	const (
		path  = `{"code":400,"message":"the path is not valid UTF-8: rename the file by a command to reach it"}`
		query = `{"code":400,"message":"the query is not readable: escape path and username as URLs have it"}`
		user  = `{"code":400,"message":"username is not valid UTF-8: name a user of the sandbox"}`
	)
	for _, c := range []struct{ query, want string }{
		{"?path=%FF", path},
		{"?path=/a/%C3%28/b", path},
		{"?path=%ED%A0%80", path}, // half a surrogate
		{"?path=%zz", query},
		{"?path=a;b", query},
		{"?path=a&username=%FF", user},
	} {
		w.do("GET", "/files"+c.query, "", address(id, token)...).want(t, "read "+c.query, 400, c.want)
		w.do("POST", "/files"+c.query, "x", address(id, token, "Content-Type", "application/octet-stream")...).want(t, "write "+c.query, 400, c.want)
	}
	form := multipartBody("form-data; name=\"file\"; filename=\"\xff\"", "x")
	w.do("POST", "/files", form, address(id, token, "Content-Type", "multipart/form-data; boundary=XX")...).want(t, "form", 400, path)
	if files := w.driver.box(id).files; len(files) > 0 {
		t.Errorf("written: %v", files)
	}
}

func TestCompose(t *testing.T) {
	w := newWorld(t)
	id, token := w.create(`{"templateID":"base"}`)
	box := w.driver.box(id)
	box.files["/1"], box.files["/2"] = []byte("one"), []byte("two")
	for _, c := range []struct {
		what, body string
		status     int
		reply      string
	}{
		{"no sources", `{"source_paths":[],"destination":"/d"}`, 400, `{"code":400,"message":"source_paths is missing or empty: name the files in their order"}`},
		{"nothing", ``, 400, `{"code":400,"message":"source_paths is missing or empty: name the files in their order"}`},
		{"no destination", `{"source_paths":["/1"]}`, 400, `{"code":400,"message":"destination is missing: give a path"}`},
		{"a wrong type", `{"source_paths":"/1","destination":"/d"}`, 400, `{"code":400,"message":"source_paths is a string where a list is expected, at line 1, column 20"}`},
		{"no UTF-8", "{\"source_paths\":[\"\xff\"],\"destination\":\"/d\"}", 400, `{"code":400,"message":"the body is not valid UTF-8"}`},
		{"too many", `{"source_paths":["/1"` + strings.Repeat(`,"/1"`, 1000) + `],"destination":"/d"}`, 400, `{"code":400,"message":"source_paths has 1001 paths and the most is 1000: compose in several steps"}`},
		{"too long", `{"source_paths":["` + strings.Repeat("x", 5000) + `"],"destination":"/d"}`, 400, `{"code":400,"message":"path '/home/user/` + strings.Repeat("x", 53) + `…' is too long: names have at most 255 bytes and paths 4095"}`},
		{"too long together", `{"source_paths":["` + strings.Repeat("x", 3000) + strings.Repeat(`","`+strings.Repeat("x", 3000), 99) + `"],"destination":"/d"}`, 413,
			`{"code":413,"message":"the arguments and environment, or the paths, have 301432 bytes together and the most is 196608: pass large input in a file or on standard input"}`},
		{"unknown user", `{"source_paths":["/1"],"destination":"/d","username":"eve"}`, 401, `{"code":401,"message":"invalid username: 'eve'"}`},
		{"two", `{"source_paths":["/2","/1"],"destination":"/d","username":"root"}`, 200, `{"name":"d","path":"/d","type":"file"}`},
	} {
		w.do("POST", "/files/compose", c.body, address(id, token, "Content-Type", "application/json")...).want(t, c.what, c.status, c.reply)
	}
	w.do("POST", "/files/compose", `{}`, address(id, "wrong")...).want(t, "wrong token", 401, `{"code":401,"message":"the access token is missing or wrong"}`)
	if string(box.files["/d"]) != "twoone" || len(box.files) != 1 {
		t.Errorf("files: %q", box.files)
	}
}

// TestConditions: conditions and ranges, as http.ServeContent has them.
func TestConditions(t *testing.T) {
	w := newWorld(t)
	id, token := w.create(`{"templateID":"base"}`)
	box := w.driver.box(id)
	text := strings.Repeat("a line of text\n", 20_000)
	box.files["/small"], box.files["/big"], box.files["/proc/x"] = []byte("0123456789"), []byte(text), []byte(text[:3000])
	const (
		date  = "Fri, 02 Jan 2026 03:04:05 GMT"
		after = "Fri, 02 Jan 2026 03:04:06 GMT"
		old   = "Fri, 02 Jan 2026 03:04:04 GMT"
		tag   = `"1886caf21c963200-a-7"`
		big   = `"1886caf21c963200-493e0-7"`
	)
	for _, c := range []struct {
		method, path string
		header       []string
		status       int
		body         string
		headers      string // ETag, Last-Modified, Content-Range, Content-Encoding
	}{
		{"GET", "/small", nil, 200, "0123456789", tag + " " + date + "  "},
		{"HEAD", "/small", nil, 200, "", tag + " " + date + "  "},
		{"HEAD", "/big", []string{"Accept-Encoding", "gzip"}, 200, "", "W/" + big + " " + date + "  gzip"},
		{"GET", "/small", []string{"If-None-Match", tag}, 304, "", tag + "   "},
		{"GET", "/small", []string{"If-None-Match", "W/" + tag}, 304, "", tag + "   "},
		{"GET", "/small", []string{"If-None-Match", "*"}, 304, "", tag + "   "},
		{"GET", "/small", []string{"If-None-Match", `"other"`}, 200, "0123456789", tag + " " + date + "  "},
		{"GET", "/small", []string{"If-None-Match", `"other"`, "If-Modified-Since", after}, 200, "0123456789", tag + " " + date + "  "},
		{"GET", "/small", []string{"If-Modified-Since", date}, 304, "", tag + "   "},
		{"GET", "/small", []string{"If-Modified-Since", old}, 200, "0123456789", tag + " " + date + "  "},
		{"GET", "/small", []string{"If-Modified-Since", "yesterday"}, 200, "0123456789", tag + " " + date + "  "},
		{"GET", "/small", []string{"If-Match", `"other"`}, 412, "", tag + " " + date + "  "},
		{"GET", "/small", []string{"If-Unmodified-Since", old}, 412, "", tag + " " + date + "  "},
		{"GET", "/small", []string{"Range", "bytes=2-4", "If-Range", tag}, 206, "234", tag + " " + date + " bytes 2-4/10 "},
		{"GET", "/small", []string{"Range", "bytes=2-4", "If-Range", date}, 206, "234", tag + " " + date + " bytes 2-4/10 "},
		{"GET", "/small", []string{"Range", "bytes=2-4", "If-Range", "W/" + tag}, 200, "0123456789", tag + " " + date + "  "},
		{"GET", "/small", []string{"Range", "bytes=2-4", "If-Range", `"other"`}, 200, "0123456789", tag + " " + date + "  "},
		{"GET", "/small", []string{"Range", "bytes=2-4", "If-Range", old}, 200, "0123456789", tag + " " + date + "  "},
		{"GET", "/small", []string{"Range", "lines=2-4"}, 416, "invalid range\n", "   "},
		{"HEAD", "/small", []string{"Range", "bytes=2-4"}, 206, "", tag + " " + date + " bytes 2-4/10 "},
		{"GET", "/big", []string{"Accept-Encoding", "gzip", "Range", "bytes=299995-"}, 206, "text\n", big + " " + date + " bytes 299995-299999/300000 "},
		{"GET", "/big", []string{"Accept-Encoding", "gzip", "Range", "bytes=65535-65537"}, 206, text[65535:65538], big + " " + date + " bytes 65535-65537/300000 "},
		{"GET", "/big", []string{"Accept-Encoding", "gzip", "If-None-Match", "W/" + big}, 304, "", big + "   "},
		{"GET", "/big", []string{"Accept-Encoding", "gzip", "If-None-Match", `"other"`}, 200, text, big + " " + date + "  "},
		{"GET", "/big", []string{"Range", "bytes=0-0,9-9"}, 200, text, big + " " + date + "  "},
		{"GET", "/proc/x", []string{"If-Modified-Since", after}, 200, text[:3000], "   "}, // what /proc says of times is as true as its sizes
		{"GET", "/proc/x", []string{"Range", "bytes=1-2"}, 206, text[1:3], "  bytes 1-2/3000 "},
	} {
		header := c.header
		if !strings.Contains(fmt.Sprint(header), "Accept-Encoding") {
			header = append(header, "Accept-Encoding", "identity")
		}
		r := w.do(c.method, "/files?path="+c.path, "", address(id, token, header...)...)
		got := strings.Join([]string{r.header.Get("ETag"), r.header.Get("Last-Modified"), r.header.Get("Content-Range"), r.header.Get("Content-Encoding")}, " ")
		if r.status != c.status || r.body != c.body || got != c.headers {
			t.Errorf("%s %s %q: %d %.100q %s, want %d %.100q %s", c.method, c.path, c.header, r.status, r.body, got, c.status, c.body, c.headers)
		}
		if r.header.Get("Vary") != "Accept-Encoding" {
			t.Errorf("%s %s %q: Vary is %q", c.method, c.path, c.header, r.header.Get("Vary"))
		}
	}
}

// TestDownloadOfChangingFile: what was promised comes, or the reply breaks off.
func TestDownloadOfChangingFile(t *testing.T) {
	w := newWorld(t)
	id, token := w.create(`{"templateID":"base"}`)
	box := w.driver.box(id)
	noise := make([]byte, 300_000)
	box.files["/shrinks"], box.files["/changes"] = noise, noise
	box.changes = true
	for _, c := range []struct {
		path, ranges string
	}{
		{"/shrinks", ""},
		{"/shrinks", "bytes=200000-300000"},
		{"/changes", "bytes=200000-"},
	} {
		req, err := http.NewRequest("GET", w.url+"/files?path="+c.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		for i, h := 0, address(id, token, "Accept-Encoding", "identity", "Range", c.ranges); i < len(h); i += 2 {
			req.Header.Set(h[i], h[i+1])
		}
		resp, err := http.DefaultTransport.RoundTrip(req)
		if err != nil {
			continue // broken off before the reply began
		}
		if n, err := io.Copy(io.Discard, resp.Body); err == nil {
			t.Errorf("%s %s: %d bytes came and ended cleanly, of %s", c.path, c.ranges, n, resp.Header.Get("Content-Length"))
		}
		resp.Body.Close()
	}
}

func TestEntryMetadata(t *testing.T) {
	w := newWorld(t)
	id, token := w.create(`{"templateID":"base"}`)
	w.driver.box(id).files["/tagged"] = nil
	r := w.rpc(id, token, "/filesystem.Filesystem/Stat", `{"path":"/tagged"}`)
	want := `{"entry":{"name":"tagged","type":"FILE_TYPE_FILE","path":"/tagged","mode":420,"permissions":"-rw-r--r--","owner":"user","group":"user","modifiedTime":"2026-01-02T03:04:05Z","metadata":{"a":"b"}}}`
	if diff := cmp.Diff(want, strings.ReplaceAll(r.body, " ", "")); diff != "" {
		t.Error(diff)
	}
}

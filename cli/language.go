package cli

import (
	"bytes"
	"path"
	"strings"

	"airlock.dev/airlock"
)

// language is a way to run a file.
type language struct {
	name       string
	others     []string // other names, those of interpreters in a first line among them
	extensions []string // the first is that of a file which has none
	command    []string // what runs it; the file and its arguments follow
	needs      string   // the program that an image may lack
}

// goRun finds the go command where distributions and its own archive put it.
const goRun = `PATH="$PATH:/usr/local/go/bin:/usr/lib/go/bin"; export GOTOOLCHAIN=local GOFLAGS=-mod=mod; exec go run "$@"`

// tsRun says what is missing before node says something obscure.
const tsRun = `v=$(node -p 'parseInt(process.versions.node)' 2>/dev/null </dev/null)
[ "${v:-0}" -ge 22 ] || { echo "airlock: TypeScript needs node 22 or newer in the image; it has ${v:-none}" >&2; exit 125; }
exec node --experimental-strip-types --no-warnings "$@"`

var languages = []language{
	{"python", []string{"python3", "py"}, []string{".py"}, []string{"python3"}, "python3"},
	{"node", []string{"javascript", "js", "nodejs"}, []string{".js", ".mjs", ".cjs"}, []string{"node"}, "node"},
	{"typescript", []string{"ts"}, []string{".ts", ".mts"}, []string{"sh", "-c", tsRun, "sh"}, "node"},
	{"bash", nil, []string{".bash"}, []string{"bash"}, "bash"},
	{"sh", []string{"shell", "dash"}, []string{".sh"}, []string{"sh"}, "sh"},
	{"perl", []string{"pl"}, []string{".pl"}, []string{"perl"}, "perl"},
	{"ruby", []string{"rb"}, []string{".rb"}, []string{"ruby"}, "ruby"},
	{"go", []string{"golang"}, []string{".go"}, []string{"sh", "-c", goRun, "sh"}, "go"},
}

func languageNames() string {
	var names []string
	for _, l := range languages {
		names = append(names, l.name)
	}
	return strings.Join(names, ", ")
}

func languageNamed(name string) (language, bool) {
	name = strings.ToLower(name)
	for _, l := range languages {
		if l.name == name {
			return l, true
		}
		for _, other := range l.others {
			if other == name {
				return l, true
			}
		}
	}
	return language{}, false
}

// languageOf decides how to run code: by the flag, then the first line, then
// the extension of the file's name.
func languageOf(flag, file string, code []byte) (language, error) {
	if flag != "" {
		if l, ok := languageNamed(flag); ok {
			return l, nil
		}
		return language{}, airlock.Invalidf("--language", "use one of "+languageNames(), "--language: unknown language %q", flag)
	}
	if l, ok := languageNamed(interpreter(code)); ok {
		return l, nil
	}
	extension := strings.ToLower(path.Ext(file))
	for _, l := range languages {
		for _, e := range l.extensions {
			if e == extension {
				return l, nil
			}
		}
	}
	what := "the code has no #! line that tells its language"
	if file != "" {
		what = "neither the name nor a #! line of " + file + " tells its language"
	}
	return language{}, airlock.Invalidf("--language", "name it with --language: "+languageNames(), "%s", what)
}

// interpreter returns the name in a first line such as #!/usr/bin/env -S python3.11 -u,
// without its version.
func interpreter(code []byte) string {
	line, _, _ := bytes.Cut(code, []byte("\n"))
	rest, found := bytes.CutPrefix(line, []byte("#!"))
	if !found {
		return ""
	}
	for i, word := range strings.Fields(string(rest)) {
		base := path.Base(word)
		if i == 0 && base == "env" || i > 0 && (strings.HasPrefix(word, "-") || strings.Contains(word, "=")) {
			continue
		}
		return strings.TrimRight(base, "0123456789.")
	}
	return ""
}

package policy

import (
	"embed"
	"io/fs"
	"strings"
)

//go:embed starter
var starterFiles embed.FS

// Starter returns the files of a new directory of policies by their paths:
// the default profile as default.cedar, a first all.cedar, an example of
// tests, and for readers the profiles and the schema. Load accepts them and
// their tests pass.
func Starter() map[string]string {
	files := map[string]string{"schema.cedarschema": schemaText}
	add := func(path string, text []byte, err error) {
		if err != nil {
			panic(err) // part of this program: the first test finds it
		}
		files[path] = string(text)
	}
	for _, name := range ProfileNames() {
		text, err := profileFiles.ReadFile("profiles/" + name + ".cedar")
		add("profiles/"+name+".cedar", text, err)
	}
	files["default.cedar"] = "// What a team may do that has no file teams/NAME.cedar of its own.\n" + files["profiles/"+DefaultProfile+".cedar"]
	err := fs.WalkDir(starterFiles, "starter", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := starterFiles.ReadFile(path)
		add(strings.TrimPrefix(path, "starter/"), text, err)
		return nil
	})
	if err != nil {
		panic(err)
	}
	return files
}

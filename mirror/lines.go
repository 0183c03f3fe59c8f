package mirror

import (
	"errors"
	"io/fs"
	"strings"
)

func isAbsent(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrInvalid) }

// entry is a setting of a file of lines.
type entry struct {
	section string // the last [section] before it
	stanza  int    // how many empty lines are before it
	key     string
	value   string // continued lines are joined with a line feed
}

// syntax is how a kind of file is written.
type syntax struct {
	between   string // the characters of which the first ends a key
	comments  string // the characters with which a comment begins, at the start of a line
	continued bool   // a line that is indented deeper than its key goes on with the value
	stanzas   bool   // empty lines separate, in place of [sections]
}

var (
	pipSyntax = syntax{between: "=:", comments: "#;", continued: true}
	npmSyntax = syntax{between: "=", comments: "#;"}
	goSyntax  = syntax{between: "=", comments: "#"}
	aptSyntax = syntax{between: ":", comments: "#", continued: true, stanzas: true}
)

// parse reads settings; a line that is none is left out.
func (s syntax) parse(text string) []entry {
	var all []entry
	section, stanza, open, depth := "", 0, false, 0
	for line := range strings.SplitSeq(text, "\n") {
		trimmed := strings.TrimSpace(line)
		indent := len(line) - len(strings.TrimLeft(line, " \t"))
		switch {
		case trimmed == "":
			stanza++
			open = open && !s.stanzas
		case strings.IndexByte(s.comments, trimmed[0]) >= 0:
		case s.continued && open && indent > depth:
			last := &all[len(all)-1]
			last.value = strings.TrimSpace(last.value + "\n" + trimmed)
		case !s.stanzas && trimmed[0] == '[' && trimmed[len(trimmed)-1] == ']':
			section, open = strings.TrimSpace(trimmed[1:len(trimmed)-1]), false
		default:
			i := strings.IndexAny(trimmed, s.between)
			if i <= 0 {
				open = false
				continue
			}
			e := entry{section: section, stanza: stanza, key: strings.TrimSpace(trimmed[:i]), value: strings.TrimSpace(trimmed[i+1:])}
			all = append(all, e)
			open, depth = true, indent
		}
	}
	return all
}

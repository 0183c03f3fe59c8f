package policy

import "regexp"

var exactWant = regexp.MustCompile(`^exact got (.*) want (.+)$`)

// inWords says what Cedar's parser says, for a person. near is the token that
// it was at, quoted; it is empty where the text ends.
func inWords(text, near string) string {
	ends := near == `""`
	m := exactWant.FindStringSubmatch(text)
	switch {
	case ends && m != nil:
		return "the text ends where `" + m[2] + "` is expected"
	case ends:
		return "the text ends in the middle of a policy (" + text + ")"
	case m != nil:
		return "`" + m[1] + "` is where `" + m[2] + "` is expected"
	case near != "":
		return text + " near " + near
	}
	return text
}

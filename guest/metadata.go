package guest

import (
	"slices"
	"strings"
	"unicode/utf8"

	"airlock.dev/airlock"
	"airlock.dev/airlock/channel"
	"golang.org/x/sys/unix"
)

// metadata returns what uploads, or the sandbox's own code, attached to a
// file. Such code can attach anything, so that only what an upload could have
// the size of is read, in the order of names, and only text.
func metadata(path string) map[string]string {
	size, err := unix.Llistxattr(path, nil)
	if err != nil || size == 0 { // or more names than the kernel lists
		return nil
	}
	names := make([]byte, size)
	if size, err = unix.Llistxattr(path, names); err != nil {
		return nil
	}
	var all map[string]string
	left := channel.MaxMetadata
	value := make([]byte, channel.MaxMetadata)
	for _, key := range keys(names[:size]) {
		name := channel.MetadataPrefix + key
		if left -= len(name); left < 0 {
			break
		}
		n, err := unix.Lgetxattr(path, name, value)
		if err != nil || n > left || !utf8.ValidString(key) || !utf8.Valid(value[:n]) {
			continue
		}
		left -= n
		if all == nil {
			all = map[string]string{}
		}
		all[key] = string(value[:n])
	}
	return all
}

// keys returns those of metadata among the names of attributes, as the kernel
// lists them.
func keys(names []byte) []string {
	var all []string
	for name := range strings.SplitSeq(string(names), "\x00") {
		if key, ok := strings.CutPrefix(name, channel.MetadataPrefix); ok && key != "" {
			all = append(all, key)
		}
	}
	slices.Sort(all)
	return all
}

// setMetadata replaces the metadata of an open file.
func setMetadata(fd int, path string, metadata map[string]string) error {
	size, err := unix.Flistxattr(fd, nil)
	if err == nil && size > 0 {
		names := make([]byte, size)
		if size, err = unix.Flistxattr(fd, names); err == nil {
			for _, key := range keys(names[:size]) {
				if _, stays := metadata[key]; stays {
					continue
				}
				if err := unix.Fremovexattr(fd, channel.MetadataPrefix+key); err != nil && err != unix.ENODATA {
					return err
				}
			}
		}
	}
	if err != nil && err != unix.ENOTSUP {
		return err
	}
	for key, value := range metadata {
		err := unix.Fsetxattr(fd, channel.MetadataPrefix+key, []byte(value), 0)
		if err == unix.ENOTSUP || err == unix.EPERM { // the latter for devices
			return airlock.Invalidf("path", "upload it without the headers X-Metadata", "path '%s' is where files keep no metadata", clip(path)).Because(err)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

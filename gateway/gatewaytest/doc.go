// Package gatewaytest attacks and loads the parts of a sandbox's network together:
// a guest in a userspace stack of its own, the door, DNS and the web, and servers
// on loopback. It has tests only, and must not know policies or the audit log.
package gatewaytest

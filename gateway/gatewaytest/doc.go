// Package gatewaytest attacks what a sandbox's network is made of, all of it
// together: a guest's TCP/IP on a wire, its door, DNS, the web, and the way of
// the host to real servers on the loopback; and it loads the gateway's process
// with many guests. It has tests only, and must not know policies or the audit
// log.
package gatewaytest

//go:build race

package gatewaytest

const race = true

//go:build race

package gatewaytest

const race = true // it takes memory of its own

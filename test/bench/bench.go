// Package bench measures speed as ratios to a named baseline in the same run:
// bare runsc, as `airlock runsc` gives it. Its figures are reported and never
// fail a build; `make bench` prints them. It has no code of its own.
package bench

#!/usr/bin/env bash
# Fails on anything that vet, gofmt or staticcheck say. The linter is pinned
# in a module of its own, so that it is no dependency of the product.
set -euo pipefail
cd "$(dirname "$0")/.."
go vet ./...
unformatted=$(git ls-files -z -- '*.go' | xargs -0 gofmt -l)
if [ -n "$unformatted" ]; then
  printf 'not formatted with gofmt:\n%s\n' "$unformatted" >&2
  exit 1
fi
exec go tool -modfile=tools/go.mod staticcheck ./...

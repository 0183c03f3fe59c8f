# Start with `make demo`. Every body is one line; what is longer is a script.
GO_STATIC = CGO_ENABLED=0 go build -trimpath -ldflags "-s -w"

.PHONY: demo test build pkcs11 bench lint check clean

demo: build ## a server, a real program and three hostile ones
	examples/demo.sh

test: build lint ## everything that CI runs
	test/run.sh

build: ## bin/airlock and bin/airlock-guest
	$(GO_STATIC) -o bin/ ./cmd/airlock ./cmd/airlock-guest

pkcs11: ## bin/airlock-pkcs11, for a root key in a token: needs a C compiler
	CGO_ENABLED=1 go build -trimpath -ldflags "-s -w" -o bin/ ./cmd/airlock-pkcs11

bench: build ## speed, as ratios to bare runsc
	test/bench.sh

lint: ## vet, format, staticcheck
	test/lint.sh

check: test ## another name for test
	@true

clean: ## what build and test made
	rm -rf bin test/e2b/node_modules test/e2b/.venv

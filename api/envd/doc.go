// Package envd holds the messages and routes of E2B's data plane, generated
// from process.proto and filesystem.proto. Those were written from the wire
// format; field numbers and names are E2B's. To generate again:
//
//	protoc -I api/envd --go_out=api/envd --go_opt=paths=source_relative \
//	  --connect-go_out=api/envd --connect-go_opt=paths=source_relative,package_suffix \
//	  process.proto filesystem.proto
package envd

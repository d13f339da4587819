//go:build tools

// Package registry names the one program that this module exists to build, so that
// `go mod tidy` keeps what it needs.
package registry

import _ "github.com/distribution/distribution/v3/cmd/registry"

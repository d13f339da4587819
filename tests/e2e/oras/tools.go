//go:build tools

// Package oras names the one program that this module exists to build, so that
// `go mod tidy` keeps what it needs.
package oras

import _ "oras.land/oras/cmd/oras"

//go:build tools

// Package etcd names the one program that this module exists to build, so that
// `go mod tidy` keeps what it needs.
package etcd

import _ "go.etcd.io/etcd/server/v3"

//go:build tools

// Package kubelet names the one program that this module exists to build, so
// that `go mod tidy` keeps what it needs.
package kubelet

import _ "k8s.io/kubernetes/cmd/kubelet"

//go:build tools

// Package nvidia names the one program that this module exists to build, so
// that `go mod tidy` keeps what it needs.
package nvidia

import _ "github.com/NVIDIA/k8s-device-plugin/cmd/nvidia-device-plugin"

//go:build tools

// Package nvidiactk names the one program that this module exists to build, so
// that `go mod tidy` keeps what it needs.
package nvidiactk

import _ "github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-ctk"

//go:build tools

// Package nvidiatoolkit names the programs that this module exists to build, so that
// `go mod tidy` keeps what they need.
package nvidiatoolkit

import (
	_ "github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-cdi-hook"
	_ "github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-ctk"
)

//go:build !nri08

package main

import (
	"context"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
)

func start(ctx context.Context, runtime *adaptation.Adaptation, pod *api.PodSandbox, container *api.Container) error {
	return runtime.StartContainer(ctx, &api.StartContainerRequest{Pod: pod, Container: container})
}

// end takes a container from its start to the removal of its pod: each event is a call of its own.
func end(ctx context.Context, runtime *adaptation.Adaptation, pod *api.PodSandbox, container *api.Container) error {
	if _, err := runtime.StopContainer(ctx, &api.StopContainerRequest{Pod: pod, Container: container}); err != nil {
		return err
	}
	if err := runtime.RemoveContainer(ctx, &api.RemoveContainerRequest{Pod: pod, Container: container}); err != nil {
		return err
	}
	if err := runtime.StopPodSandbox(ctx, &api.StopPodSandboxRequest{Pod: pod}); err != nil {
		return err
	}
	return runtime.RemovePodSandbox(ctx, &api.RemovePodSandboxRequest{Pod: pod})
}

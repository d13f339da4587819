//go:build nri08

package main

import (
	"context"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
)

func start(ctx context.Context, runtime *adaptation.Adaptation, pod *api.PodSandbox, container *api.Container) error {
	return runtime.StartContainer(ctx, &api.StateChangeEvent{Pod: pod, Container: container})
}

// end takes a container from its start to the removal of its pod: up to NRI 0.11 most events are changes of state.
func end(ctx context.Context, runtime *adaptation.Adaptation, pod *api.PodSandbox, container *api.Container) error {
	change := &api.StateChangeEvent{Pod: pod, Container: container}
	if _, err := runtime.StopContainer(ctx, &api.StopContainerRequest{Pod: pod, Container: container}); err != nil {
		return err
	}
	if err := runtime.RemoveContainer(ctx, change); err != nil {
		return err
	}
	if err := runtime.StopPodSandbox(ctx, &api.StateChangeEvent{Pod: pod}); err != nil {
		return err
	}
	return runtime.RemovePodSandbox(ctx, &api.StateChangeEvent{Pod: pod})
}

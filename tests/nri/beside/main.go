// Another plugin of the container runtime, by containerd's own library, that runs beside the guard: it gives each container
// the variable BESIDE, and all GPUs by NVIDIA_VISIBLE_DEVICES to one that has this variable.
//
//	beside SOCKET
package main

import (
	"context"
	"log"
	"os"
	"strings"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
)

const visibleDevices = "NVIDIA_VISIBLE_DEVICES"

type plugin struct{}

// Synchronize is the last step of the registration: containers that are created after it are changed.
func (plugin) Synchronize(context.Context, []*api.PodSandbox, []*api.Container) ([]*api.ContainerUpdate, error) {
	log.Print("synchronized")
	return nil, nil
}

func (plugin) CreateContainer(_ context.Context, _ *api.PodSandbox, container *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	adjusted := &api.ContainerAdjustment{}
	adjusted.AddEnv("BESIDE", "yes")
	for _, variable := range container.Env {
		if name, _, _ := strings.Cut(variable, "="); name == visibleDevices {
			adjusted.RemoveEnv(name)
			adjusted.AddEnv(name, "all")
		}
	}
	return adjusted, nil, nil
}

func main() {
	beside, err := stub.New(plugin{}, stub.WithPluginName("beside"), stub.WithPluginIdx("10"), stub.WithSocketPath(os.Args[1]))
	if err == nil {
		err = beside.Run(context.Background())
	}
	if err != nil {
		log.Fatal(err)
	}
}

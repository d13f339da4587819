// Another plugin of the container runtime, by containerd's own library, that runs beside the guard: it gives each container
// the variable BESIDE.
//
//	beside SOCKET
package main

import (
	"context"
	"log"
	"os"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
)

type plugin struct{}

func (plugin) CreateContainer(context.Context, *api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	adjusted := &api.ContainerAdjustment{}
	adjusted.AddEnv("BESIDE", "yes")
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

// The runtime's side of NRI, by containerd's own library: it shows a plugin the pods and containers of a node, then
// creates, starts, stops and removes more of them, and prints what the plugin answered and how long that took. If NRI_HOLD
// is set, it then stays connected until its standard input is closed. If NRI_CGROUP names a folder of cgroup v2, each
// container has a process, in a cgroup of its own there. If NRI_PACED is set, it pauses before each container, as a node
// does, and every second one has no grant.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
)

// Result is what this program prints.
type Result struct {
	SyncMs          float64 `json:"syncMs"`
	CreateP50Us     int64   `json:"createP50Us"`
	CreateP99Us     int64   `json:"createP99Us"`
	AddedP50Us      int64   `json:"addedP50Us"`
	AddedP99Us      int64   `json:"addedP99Us"`
	AddedPlainP50Us int64   `json:"addedPlainP50Us"`
	AddedPlainP99Us int64   `json:"addedPlainP99Us"`
	Adjusted        int     `json:"adjusted"`
	RefusalError    string  `json:"refusalError"`
}

func main() {
	if err := run(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// run listens in a folder, has one plugin synchronized with so many containers, each with so many bytes of
// environment, and takes containers through their lives.
func run(folder, containers, bytes string) error {
	count, err := strconv.Atoi(containers)
	if err != nil {
		return err
	}
	padding, err := strconv.Atoi(bytes)
	if err != nil {
		return err
	}
	processes := newProcesses()
	defer processes.endAll()
	var pods []*api.PodSandbox
	var running []*api.Container
	for i := 0; i < count; i++ {
		pod, container := newPair(i, padding)
		if err := processes.start(container); err != nil {
			return err
		}
		pods, running = append(pods, pod), append(running, container)
	}
	var result Result
	synced := make(chan error, 1)
	// The library also synchronizes its own plugins, of which there are none, while it starts.
	started := false
	sync := func(ctx context.Context, call adaptation.SyncCB) error {
		if !started {
			_, err := call(ctx, nil, nil)
			return err
		}
		begin := time.Now()
		_, err := call(ctx, pods, running)
		result.SyncMs = float64(time.Since(begin).Microseconds()) / 1000
		synced <- err
		return err
	}
	update := func(context.Context, []*api.ContainerUpdate) ([]*api.ContainerUpdate, error) { return nil, nil }
	runtime, err := adaptation.New("nri-test", "1.0.0", sync, update,
		adaptation.WithSocketPath(filepath.Join(folder, "nri.sock")),
		adaptation.WithPluginPath(filepath.Join(folder, "plugins")),
		adaptation.WithPluginConfigPath(filepath.Join(folder, "conf.d")))
	if err != nil {
		return err
	}
	if err := runtime.Start(); err != nil {
		return err
	}
	started = true
	defer runtime.Stop()
	select {
	case err := <-synced:
		if err != nil {
			return fmt.Errorf("the synchronization failed: %w", err)
		}
	case <-time.After(60 * time.Second):
		return fmt.Errorf("no plugin came")
	}
	// The plugin takes part once the synchronization has returned to the library.
	time.Sleep(200 * time.Millisecond)
	ctx := context.Background()
	var took, added, addedPlain []int64
	pause, lives, isPaced := time.Duration(0), 1000, os.Getenv("NRI_PACED") != ""
	if isPaced {
		pause, lives = 20*time.Millisecond, 400
	}
	for i := count; i < count+lives; i++ {
		time.Sleep(pause)
		pod, container := newPair(i, padding)
		isPlain := isPaced && i%2 == 1
		if isPlain {
			container.Annotations = nil
		}
		if err := processes.start(container); err != nil {
			return err
		}
		begin := time.Now()
		answer, err := runtime.CreateContainer(ctx, &api.CreateContainerRequest{Pod: pod, Container: container})
		took = append(took, time.Since(begin).Microseconds())
		if err != nil {
			return fmt.Errorf("CreateContainer: %w", err)
		}
		for _, variable := range answer.GetAdjust().GetEnv() {
			if variable.GetKey() == "BERTH_SEEN" && variable.GetValue() == container.GetName() {
				result.Adjusted++
			}
		}
		begin = time.Now()
		if err := start(ctx, runtime, pod, container); err != nil {
			return fmt.Errorf("StartContainer: %w", err)
		}
		total := took[len(took)-1] + time.Since(begin).Microseconds()
		if isPlain {
			addedPlain = append(addedPlain, total)
		} else {
			added = append(added, total)
		}
		if err := processes.end(container.Id); err != nil {
			return err
		}
		if err := end(ctx, runtime, pod, container); err != nil {
			return err
		}
	}
	pod, container := newPair(0, 0)
	container.Name = "refused"
	if _, err := runtime.CreateContainer(ctx, &api.CreateContainerRequest{Pod: pod, Container: container}); err != nil {
		result.RefusalError = err.Error()
	}
	result.CreateP50Us, result.CreateP99Us = percentiles(took)
	result.AddedP50Us, result.AddedP99Us = percentiles(added)
	if isPaced {
		result.AddedPlainP50Us, result.AddedPlainP99Us = percentiles(addedPlain)
	}
	if err := json.NewEncoder(os.Stdout).Encode(result); err != nil {
		return err
	}
	if os.Getenv("NRI_HOLD") != "" {
		_, err = io.Copy(io.Discard, os.Stdin)
	}
	return err
}

func percentiles(took []int64) (int64, int64) {
	sort.Slice(took, func(a, b int) bool { return took[a] < took[b] })
	return took[len(took)/2], took[len(took)*99/100]
}

// newPair makes a pod and its container. NRI_GRANT, with %d in the place of the container's number, is the annotation of
// its grant.
func newPair(i, padding int) (*api.PodSandbox, *api.Container) {
	pod := &api.PodSandbox{
		Id: fmt.Sprintf("sandbox-%d", i), Name: fmt.Sprintf("pod-%d", i), Uid: fmt.Sprintf("uid-%d", i), Namespace: "default",
	}
	container := &api.Container{
		Id: fmt.Sprintf("container-%d", i), PodSandboxId: pod.Id, Name: fmt.Sprintf("main-%d", i),
		State: api.ContainerState_CONTAINER_RUNNING,
		Env:   []string{"PADDING=" + strings.Repeat("x", padding)},
		Linux: &api.LinuxContainer{CgroupsPath: fmt.Sprintf("/kubepods/%d", i)},
	}
	if grant := os.Getenv("NRI_GRANT"); grant != "" {
		container.Annotations = map[string]string{"berth.dev/grant.nvidia.com_gpu": fmt.Sprintf(grant, i)}
	}
	return pod, container
}

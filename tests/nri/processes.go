package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"

	"github.com/containerd/nri/pkg/api"
)

// processes are those of containers, each in a cgroup of its own below a folder of cgroup v2, as a runtime makes them.
// Without a folder, containers have none.
type processes struct {
	folder  string
	running map[string]*exec.Cmd
}

func newProcesses() *processes {
	return &processes{folder: os.Getenv("NRI_CGROUP"), running: map[string]*exec.Cmd{}}
}

// start makes the process of a container.
func (p *processes) start(container *api.Container) error {
	if p.folder == "" {
		return nil
	}
	cgroup := filepath.Join(p.folder, container.Id)
	if err := os.Mkdir(cgroup, 0o755); err != nil {
		return err
	}
	process := exec.Command("sleep", "infinity")
	if err := process.Start(); err != nil {
		return err
	}
	p.running[container.Id] = process
	container.Pid = uint32(process.Process.Pid)
	return os.WriteFile(filepath.Join(cgroup, "cgroup.procs"), []byte(strconv.Itoa(process.Process.Pid)), 0o600)
}

// end ends the process of a container, which a runtime does before it says so, and removes its cgroup.
func (p *processes) end(id string) error {
	process, found := p.running[id]
	if !found {
		return nil
	}
	delete(p.running, id)
	if err := process.Process.Kill(); err != nil {
		return err
	}
	// It was killed, which is an error here.
	_ = process.Wait()
	if err := os.Remove(filepath.Join(p.folder, id)); err != nil {
		return fmt.Errorf("the cgroup of %s: %w", id, err)
	}
	return nil
}

// endAll ends what runs.
func (p *processes) endAll() {
	for id := range p.running {
		if err := p.end(id); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}
}

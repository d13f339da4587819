//! A plugin that prints what the runtime shows it, one line a call: `observe /var/run/nri/nri.sock`. It sets `BERTH_SEEN`
//! in each container, and refuses containers of the name `refused`.

use berth_guard::nri::{Container, ContainerAdjustment, KeyValue, PodSandbox};
use berth_guard::{ContainerEvent, Plugin, Refusal, RuntimeInfo, run};
use std::io::{Error, Write, stdout};
use tokio::net::UnixStream;

struct Observer;

fn print(line: &str) {
    // If nothing reads it any more, the session goes on until the runtime closes it.
    let _ = writeln!(stdout(), "{line}");
}

impl Plugin for Observer {
    fn configure(&mut self, runtime: RuntimeInfo) {
        print(&format!("configured by {} {}", runtime.name, runtime.version));
    }

    async fn synchronize(&mut self, pods: Vec<PodSandbox>, containers: Vec<Container>) {
        print(&format!("synchronized pods={} containers={}", pods.len(), containers.len()));
    }

    async fn create_container(
        &mut self,
        pod: PodSandbox,
        container: Container,
    ) -> Result<ContainerAdjustment, Refusal> {
        print(&format!("create {}/{}/{} {}", pod.namespace, pod.name, container.name, pod.uid));
        if container.name == "refused" {
            return Err(Refusal("the plugin `observe` refuses containers of this name".into()));
        }
        let env = vec![KeyValue { key: "BERTH_SEEN".into(), value: container.name }];
        Ok(ContainerAdjustment { env, ..ContainerAdjustment::default() })
    }

    async fn start_container(&mut self, pod: PodSandbox, container: Container) -> Result<(), Refusal> {
        let cgroup = container.linux.map(|linux| linux.cgroups_path).unwrap_or_default();
        print(&format!(
            "start {}/{}/{} pid={} cgroup={cgroup}",
            pod.namespace, pod.name, container.name, container.pid
        ));
        Ok(())
    }

    async fn observe(&mut self, event: ContainerEvent) {
        let container = event.container.map(|container| container.name).unwrap_or_default();
        print(&format!("{:?} {}/{}/{container}", event.event, event.pod.namespace, event.pod.name));
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Error> {
    let path = std::env::args_os().nth(1).ok_or_else(|| Error::other("usage: observe NRI_SOCKET"))?;
    let socket = UnixStream::connect(path).await?;
    run(socket, &mut Observer).await.map_err(Error::other)
}

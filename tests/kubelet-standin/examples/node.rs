//! A stand-in kubelet on a folder, controlled by lines on its standard input: for tests that run the daemon
//! as a separate process.
//!
//! ```text
//! node FOLDER
//! run NAMESPACE/POD RESOURCE COUNT    starts a pod with one container, main
//! end NAMESPACE/POD                   ends and deletes the pod
//! wait RESOURCE COUNT                 waits until COUNT devices are allocatable, at most a minute
//! devices                             the last list of each served resource, as JSON
//! allocate RESOURCE ID,ID             the plugin's Allocate response, as JSON; for no pod
//! prefer RESOURCE COUNT ID,ID         the ids that the plugin prefers, as JSON
//! ```
//!
//! Each line is answered by one line: `ok` and the requested JSON, or `no:` and the error. The program
//! stops at the end of its input.

// Its output is the protocol.
#![allow(clippy::print_stdout)]

use kubelet_standin::proto::v1beta1::ContainerAllocateResponse;
use kubelet_standin::{Kubelet, PodSpec};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead, stdin};
use std::time::Duration;

/// The time limit of `wait`.
const WAIT: Duration = Duration::from_secs(60);

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args().nth(1).ok_or("usage: node FOLDER")?;
    let kubelet = Kubelet::started(folder).await?;
    println!("ok");
    let mut pods = BTreeMap::new();
    loop {
        // The caller sends the next command after the response.
        let line = tokio::task::spawn_blocking(|| stdin().lock().lines().next()).await?;
        let Some(line) = line.transpose()? else { break };
        match command(&kubelet, &mut pods, &line).await {
            Ok(output) => println!("{}", format!("ok {output}").trim_end()),
            Err(error) => println!("no: {}", error.replace('\n', " ")),
        }
    }
    kubelet.stop().await;
    Ok(())
}

async fn command(
    kubelet: &Kubelet,
    pods: &mut BTreeMap<String, String>,
    line: &str,
) -> Result<String, String> {
    let done = Ok(String::new());
    let arguments: Vec<_> = line.split_whitespace().collect();
    match arguments[..] {
        ["run", pod, resource, count] => {
            let (namespace, name) = pod.split_once('/').ok_or("a pod is given as NAMESPACE/POD")?;
            let spec = PodSpec::new(namespace, name).container("main", &[(resource, number(count)?)]);
            let uid = spec.uid.clone();
            kubelet.admit(spec).await.map_err(|e| e.to_string())?;
            kubelet.run(&uid).await.map_err(|e| e.to_string())?;
            pods.insert(pod.to_owned(), uid);
            done
        }
        ["end", pod] => {
            let uid = pods.remove(pod).ok_or("no such pod is running")?;
            kubelet.finish(&uid);
            kubelet.delete(&uid);
            done
        }
        ["wait", resource, count] => {
            let result = kubelet.wait_allocatable(resource, number(count)?, WAIT).await;
            result.map_err(|e| e.to_string())?;
            done
        }
        ["devices"] => {
            let served = kubelet.resources().into_iter().filter(|resource| kubelet.is_served(resource));
            let lists: BTreeMap<_, _> =
                served.map(|resource| (resource.clone(), kubelet.listed(&resource))).collect();
            serde_json::to_string(&lists).map_err(|e| e.to_string())
        }
        ["allocate", resource, ids] => {
            let ids: Vec<String> = ids.split(',').map(str::to_owned).collect();
            let result = kubelet.call_plugin_allocate(resource, &ids).await;
            let response = result.map_err(|e| e.message().to_owned())?;
            Ok(json(&response).to_string())
        }
        ["prefer", resource, count, ids] => {
            let ids: Vec<String> = ids.split(',').map(str::to_owned).collect();
            let result = kubelet.call_plugin_preferred(resource, &ids, number(count)?).await;
            Ok(json!(result.map_err(|e| e.message().to_owned())?).to_string())
        }
        _ => Err("run NAMESPACE/POD RESOURCE COUNT, end NAMESPACE/POD, wait RESOURCE COUNT, devices, \
                  allocate RESOURCE ID,ID, prefer RESOURCE COUNT ID,ID"
            .into()),
    }
}

fn json(response: &ContainerAllocateResponse) -> Value {
    let mounts = response.mounts.iter();
    let devices = response.devices.iter();
    let names: Vec<&str> = response.cdi_devices.iter().map(|device| device.name.as_str()).collect();
    json!({
        "envs": response.envs,
        "mounts": mounts.map(|m| json!([m.host_path, m.container_path, m.read_only])).collect::<Vec<_>>(),
        "devices": devices.map(|d| json!([d.host_path, d.container_path, d.permissions])).collect::<Vec<_>>(),
        "annotations": response.annotations,
        "cdi": names,
    })
}

fn number(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| format!("{text} is not a number"))
}

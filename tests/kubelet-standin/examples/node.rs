//! A stand-in kubelet on a folder, moved by lines on its standard input: for tests that run the daemon
//! as a program of its own.
//!
//! ```text
//! node FOLDER
//! run NAMESPACE/POD RESOURCE COUNT    a pod with one container, main, starts
//! end NAMESPACE/POD                   it has ended and is deleted
//! wait RESOURCE COUNT                 until so many devices can be had, at most a minute
//! devices                             the last list of each resource that a plugin serves, as JSON
//! allocate RESOURCE ID,ID             what its plugin answers, as JSON; no pod has it then
//! prefer RESOURCE COUNT ID,ID         which of these its plugin prefers, as JSON
//! ```
//!
//! Each line is answered by one: `ok` and the JSON that was asked for, or `no:` and why. It stops when its
//! input ends.

// It talks to the program that started it.
#![allow(clippy::print_stdout)]

use kubelet_standin::proto::v1beta1::ContainerAllocateResponse;
use kubelet_standin::{Kubelet, PodSpec};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead, stdin};
use std::time::Duration;

/// Longest `wait`.
const WAIT: Duration = Duration::from_secs(60);

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args().nth(1).ok_or("which folder? node FOLDER")?;
    let kubelet = Kubelet::started(folder).await?;
    println!("ok");
    let mut pods = BTreeMap::new();
    loop {
        // Commands come one at a time: whoever asks waits for the answer.
        let line = tokio::task::spawn_blocking(|| stdin().lock().lines().next()).await?;
        let Some(line) = line.transpose()? else { break };
        match command(&kubelet, &mut pods, &line).await {
            Ok(answer) => println!("{}", format!("ok {answer}").trim_end()),
            Err(why) => println!("no: {}", why.replace('\n', " ")),
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
    let words: Vec<_> = line.split_whitespace().collect();
    match words[..] {
        ["run", pod, resource, count] => {
            let (namespace, name) = pod.split_once('/').ok_or("a pod is NAMESPACE/POD")?;
            let spec = PodSpec::new(namespace, name).container("main", &[(resource, number(count)?)]);
            let uid = spec.uid.clone();
            kubelet.admit(spec).await.map_err(|e| e.to_string())?;
            kubelet.run(&uid).await.map_err(|e| e.to_string())?;
            pods.insert(pod.to_owned(), uid);
            done
        }
        ["end", pod] => {
            let uid = pods.remove(pod).ok_or("no such pod runs")?;
            kubelet.finish(&uid);
            kubelet.delete(&uid);
            done
        }
        ["wait", resource, count] => {
            let met = kubelet.wait_allocatable(resource, number(count)?, WAIT).await;
            met.map_err(|e| e.to_string())?;
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
            let answer = kubelet.ask_allocate(resource, &ids).await.map_err(|e| e.message().to_owned())?;
            Ok(json(&answer).to_string())
        }
        ["prefer", resource, count, of] => {
            let of: Vec<String> = of.split(',').map(str::to_owned).collect();
            let answer = kubelet.ask_preferred(resource, &of, number(count)?).await;
            Ok(json!(answer.map_err(|e| e.message().to_owned())?).to_string())
        }
        _ => Err("run NAMESPACE/POD RESOURCE COUNT, end NAMESPACE/POD, wait RESOURCE COUNT, devices, \
                  allocate RESOURCE ID,ID, prefer RESOURCE COUNT ID,ID"
            .into()),
    }
}

fn json(answer: &ContainerAllocateResponse) -> Value {
    let mounts = answer.mounts.iter();
    let devices = answer.devices.iter();
    let names: Vec<&str> = answer.cdi_devices.iter().map(|device| device.name.as_str()).collect();
    json!({
        "envs": answer.envs,
        "mounts": mounts.map(|m| json!([m.host_path, m.container_path, m.read_only])).collect::<Vec<_>>(),
        "devices": devices.map(|d| json!([d.host_path, d.container_path, d.permissions])).collect::<Vec<_>>(),
        "annotations": answer.annotations,
        "cdi": names,
    })
}

fn number(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| format!("{text} is no number"))
}

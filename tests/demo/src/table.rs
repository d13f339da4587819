//! GPUs and allocations as a table, read over the admin API.

use crate::Node;
use crate::workload::Workload;
use serde_json::Value;
use std::io::IsTerminal;

/// Prints the node; on a terminal in place of the last one if `live`.
pub(crate) async fn print(node: &Node, work: &Workload, live: bool) -> anyhow::Result<()> {
    let gpus = node.api.get("/gpus").await?;
    let allocations = node.api.get("/allocations").await?;
    let in_place = live && std::io::stdout().is_terminal();
    if in_place {
        print!("\x1b[2J\x1b[H");
    }
    println!("  {:<5} {:<22} {:<9} {:<10} HELD BY", "GPU", "MODEL", "HEALTH", "STATE");
    for gpu in items(&gpus) {
        let uuid = text(gpu, "uuid");
        println!(
            "  {:<5} {:<22} {:<9} {:<10} {}",
            gpu["index"].to_string(),
            text(gpu, "model").trim_start_matches("NVIDIA "),
            gpu["health"]["state"].as_str().unwrap_or("?"),
            gpu["drain"]["state"].as_str().unwrap_or("?"),
            holders(uuid, &allocations, &work.names()),
        );
    }
    println!();
    if in_place {
        node.print_way_in();
    }
    Ok(())
}

/// Who holds something of a GPU. A pod that has finished holds it until the daemon finds out, and is marked.
fn holders(uuid: &str, allocations: &Value, running: &[String]) -> String {
    let on_gpu = |a: &&Value| {
        let devices = a["devices"].as_array().into_iter().flatten();
        devices.filter_map(Value::as_str).any(|id| id == uuid || id.starts_with(&format!("{uuid}::")))
    };
    let name = |a: &Value| match a["holder"]["pod"].as_str() {
        None => "(not yet known)".to_owned(),
        Some(pod) if running.iter().any(|name| name == pod) => pod.to_owned(),
        Some(pod) => format!("{pod} (finished, not noticed yet)"),
    };
    let mut names: Vec<String> = items(allocations).filter(on_gpu).map(name).collect();
    names.sort_unstable();
    if names.is_empty() { "-".into() } else { names.join(", ") }
}

pub(crate) fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list["items"].as_array().into_iter().flatten()
}

fn text<'v>(value: &'v Value, key: &str) -> &'v str {
    value[key].as_str().unwrap_or("")
}

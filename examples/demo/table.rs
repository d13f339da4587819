//! GPUs and allocations as a table, read over the admin API.

use crate::Node;
use serde_json::Value;
use std::io::IsTerminal;

/// Prints the node; on a terminal in place of the last one if `live`.
pub(crate) async fn print(node: &Node, live: bool) -> anyhow::Result<()> {
    let gpus = node.api.get("/gpus").await?;
    let allocations = node.api.get("/allocations").await?;
    if live && std::io::stdout().is_terminal() {
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
            holders(uuid, &allocations),
        );
    }
    println!();
    Ok(())
}

fn holders(uuid: &str, allocations: &Value) -> String {
    let on_gpu = |a: &&Value| {
        let devices = a["devices"].as_array().into_iter().flatten();
        devices.filter_map(Value::as_str).any(|id| id == uuid || id.starts_with(&format!("{uuid}::")))
    };
    let mut names: Vec<&str> = items(allocations)
        .filter(on_gpu)
        .map(|a| a["holder"]["pod"].as_str().unwrap_or("(not yet known)"))
        .collect();
    names.sort_unstable();
    if names.is_empty() { "-".into() } else { names.join(", ") }
}

pub(crate) fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list["items"].as_array().into_iter().flatten()
}

fn text<'v>(value: &'v Value, key: &str) -> &'v str {
    value[key].as_str().unwrap_or("")
}

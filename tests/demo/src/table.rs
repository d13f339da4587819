//! GPUs and allocations as a table, read over the admin API.

use crate::Node;
use crate::workload::Workload;
use serde_json::Value;

/// Shows the GPUs and their pods.
pub(crate) async fn print(node: &Node, work: &Workload) -> anyhow::Result<()> {
    let gpus = node.api.get("/gpus").await?;
    let allocations = node.api.get("/allocations").await?;
    let mut table =
        format!("  {:<4} {:<10} {:<11} {:<8} HELD BY\n", "GPU", "HEALTH", "SCHEDULING", "MEM GIB");
    for gpu in items(&gpus) {
        let uuid = text(gpu, "uuid");
        let gib =
            |key: &str| gpu[key].as_u64().map_or_else(|| "?".into(), |mib| ((mib + 512) / 1024).to_string());
        let state = gpu["drain"]["state"].as_str().unwrap_or("?");
        table += &format!(
            "  {:<4} {:<10} {:<11} {:<8} {}\n",
            gpu["index"].to_string(),
            gpu["health"]["state"].as_str().unwrap_or("?"),
            if state == "active" { "open" } else { state },
            format!("{}/{}", gib("memoryUsedMiB"), gib("memoryMiB")),
            holders(uuid, &allocations, &work.names()),
        );
    }
    node.screen.table(&table);
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

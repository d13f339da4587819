//! The parameters of a policy as a table, from their JSON schema. It reads what schemas of policies contain:
//! properties, lists, references into `$defs`, alternatives. The whole schema is in `-o json`.

use crate::output::Column::{Name, Text};
use crate::output::{fitted, in_lines, printable};
use serde_json::Value;

/// Levels of nested objects that are shown; deeper ones are shown as `object`.
const DEPTH_MAX: usize = 4;
/// Rows at most: a schema has 6 KiB, and may refer to one of its parts many times.
const ROWS_MAX: usize = 200;

/// The text below the facts of a policy: a table of its parameters, or a line if it has none.
pub fn shown(schema: &Value) -> String {
    let mut rows = Vec::new();
    collect(schema, schema, "", 0, &mut rows);
    if rows.is_empty() {
        let closed = schema.get("additionalProperties") == Some(&Value::Bool(false));
        let none = if closed { "none" } else { "its schema lists none; -o json shows it" };
        return format!("parameters: {none}\n");
    }
    let more = rows.len() > ROWS_MAX;
    rows.truncate(ROWS_MAX);
    let more = if more { "...; -o json shows the whole schema\n" } else { "" };
    // A description of its own line: it is a sentence or two.
    let descriptions: Vec<_> = rows.iter_mut().filter_map(|row| row.pop()).collect();
    let table = fitted(&[("PARAMETER", Name), ("TYPE", Text), ("DEFAULT", Text)], rows);
    let mut lines = table.lines();
    let mut text = format!("\n{}\n", lines.next().unwrap_or_default());
    for (line, description) in lines.zip(&descriptions) {
        text += &format!("{line}\n");
        // They fit 80 columns with their indentation.
        for part in in_lines(&printable(description), 76) {
            text += &format!("    {part}\n");
        }
    }
    text + more
}

/// A row for each property of an object, and below it those of what it holds.
fn collect(root: &Value, schema: &Value, prefix: &str, depth: usize, rows: &mut Vec<Vec<String>>) {
    let schema = resolved(root, schema);
    let Some(properties) = schema.get("properties").and_then(Value::as_object) else { return };
    let required: Vec<&str> = schema
        .get("required")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    for (key, property) in properties {
        if rows.len() > ROWS_MAX {
            return;
        }
        let name = format!("{prefix}{key}");
        let default = match property.get("default").or_else(|| resolved(root, property).get("default")) {
            Some(Value::String(text)) if !text.is_empty() => text.clone(),
            Some(default) => default.to_string(),
            None if required.contains(&key.as_str()) => "(required)".to_owned(),
            None => "-".to_owned(),
        };
        let description = property.get("description").or_else(|| resolved(root, property).get("description"));
        let description = description.and_then(Value::as_str).unwrap_or_default().to_owned();
        rows.push(vec![name.clone(), kind(root, property, 0), default, description]);
        if depth < DEPTH_MAX {
            let inner = resolved(root, property);
            match inner.get("items") {
                Some(items) => collect(root, items, &format!("{name}[]."), depth + 1, rows),
                None => collect(root, inner, &format!("{name}."), depth + 1, rows),
            }
        }
    }
}

/// The target of a `$ref` into the same schema; the schema itself if it has none, or one without a target.
fn resolved<'s>(root: &'s Value, schema: &'s Value) -> &'s Value {
    let reference = schema.get("$ref").and_then(Value::as_str).and_then(|r| r.strip_prefix('#'));
    reference.and_then(|path| root.pointer(path)).unwrap_or(schema)
}

/// `integer, 1 to 128`, `list of string`, `both | latched`.
fn kind(root: &Value, schema: &Value, depth: usize) -> String {
    let schema = resolved(root, schema);
    let list = |key: &str| schema.get(key).and_then(Value::as_array);
    if let Some(values) = list("enum") {
        let words = values.iter().map(|v| v.as_str().map_or_else(|| v.to_string(), str::to_owned));
        return words.collect::<Vec<_>>().join(" | ");
    }
    if let Some(others) = list("oneOf").or_else(|| list("anyOf"))
        && depth < DEPTH_MAX
    {
        return others.iter().map(|other| kind(root, other, depth + 1)).collect::<Vec<_>>().join(" or ");
    }
    let types = match schema.get("type") {
        Some(Value::String(one)) => one.clone(),
        Some(Value::Array(several)) => {
            several.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" or ")
        }
        _ => return "any".to_owned(),
    };
    if types == "array" {
        return match schema.get("items") {
            Some(items) if depth < DEPTH_MAX => format!("list of {}", kind(root, items, depth + 1)),
            _ => "list".to_owned(),
        };
    }
    let number = |key: &str| schema.get(key).filter(|v| v.is_number()).map(ToString::to_string);
    let range = match (number("minimum"), number("maximum")) {
        (Some(least), Some(most)) => format!(", {least} to {most}"),
        (Some(least), None) => format!(", {least} or more"),
        (None, Some(most)) => format!(", at most {most}"),
        (None, None) => String::new(),
    };
    types + &range
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_schema_is_a_table_with_lists_references_and_required_keys() {
        let schema = json!({
            "type": "object",
            "required": ["namespace"],
            "properties": {
                "namespace": {"type": "string", "description": "Whose."},
                "replicas": {"type": "integer", "minimum": 1, "maximum": 128, "default": 4, "description": "Shares."},
                "advertise": {"enum": ["both", "latched"], "default": "both"},
                "only": {"type": "array", "items": {"$ref": "#/$defs/selector"}, "description": "Which GPUs."},
                "size": {"oneOf": [{"type": "integer", "minimum": 0}, {"type": ["string", "null"]}]}
            },
            "$defs": {"selector": {"type": "object", "properties": {"index": {"type": "integer", "minimum": 0}}}}
        });
        let lines = [
            "",
            "PARAMETER     TYPE                                  DEFAULT",
            "advertise     both | latched                        both",
            "namespace     string                                (required)",
            "    Whose.",
            "only          list of object                        -",
            "    Which GPUs.",
            "only[].index  integer, 0 or more                    -",
            "replicas      integer, 1 to 128                     4",
            "    Shares.",
            "size          integer, 0 or more or string or null  -",
            "",
        ];
        assert_eq!(shown(&schema), lines.join("\n"));
    }

    #[test]
    fn none_and_a_schema_that_refers_to_itself_end() {
        assert_eq!(shown(&json!({"additionalProperties": false})), "parameters: none\n");
        assert!(shown(&json!({})).contains("-o json"));
        let own = json!({"properties": {"a": {"$ref": "#"}, "b": {"$ref": "#"}, "c": {"type": "array", "items": {"$ref": "#"}}}});
        let rows = shown(&own).lines().count();
        assert!(rows <= ROWS_MAX + 3, "{rows}");
    }

    #[test]
    fn every_shipped_policy_has_its_parameters_in_a_table() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policies-wasm");
        let mut found = 0;
        for policy in folder.read_dir().unwrap() {
            let Ok(text) = std::fs::read_to_string(policy.unwrap().path().join("schema.json")) else {
                continue;
            };
            let schema: Value = serde_json::from_str(&text).unwrap();
            let shown = shown(&schema);
            for key in schema["properties"].as_object().unwrap().keys() {
                assert!(shown.lines().any(|line| line.starts_with(key.as_str())), "{key}: {shown}");
            }
            assert!(!shown.contains("  any "), "{shown}");
            found += 1;
        }
        assert!(found >= 9, "{found}");
    }
}

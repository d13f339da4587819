//! Recognises a Kubernetes object where a file is expected: a ConfigMap that was pasted whole, with the file in it.

use super::problem::{Problem, shown};
use super::tree::{Node, Value};
use std::ops::RangeInclusive;

/// The problem of a text that is a Kubernetes object; `None` for any other text.
pub(super) fn problem(root: &Node, text: &str) -> Option<Problem> {
    let (Some(_), Some((key, kind))) = (entry(root, "apiVersion"), entry(root, "kind")) else {
        return None;
    };
    let kind = kind.text();
    let what = match file_of(root, &kind) {
        Some((name, at)) => {
            let name = shown(&name.text());
            let cut = cut(text, at.place.line).map_or_else(
                || format!("put the text of line {} into a file of its own", at.place.line),
                |(lines, indent)| {
                    let (first, last, indent) = (lines.start(), lines.end(), " ".repeat(indent));
                    format!(
                        "cut line {} and all lines above it, all lines below line {last}, and the indentation of the \
                         others: `sed -n '{first},{last}{{s/^{indent}//;p}}' FILE`",
                        first - 1
                    )
                },
            );
            format!("this is a Kubernetes {kind}, and its key {name} is the file: {cut}")
        }
        None => format!("this is a Kubernetes object (kind: {kind}), and not the file that is expected here"),
    };
    Some(Problem { place: Some(key.place), key: "kind".into(), what })
}

/// The first key of a ConfigMap's or Secret's plain texts, and its value.
fn file_of<'n>(root: &'n Node, kind: &str) -> Option<(&'n Node, &'n Node)> {
    let texts = match kind {
        "ConfigMap" => "data",
        "Secret" => "stringData",
        _ => return None,
    };
    let (_, data) = entry(root, texts)?;
    let Value::Map(files) = &data.value else { return None };
    files.first().map(|(name, value)| (name, value))
}

fn entry<'n>(node: &'n Node, name: &str) -> Option<(&'n Node, &'n Node)> {
    let Value::Map(entries) = &node.value else { return None };
    entries.iter().find(|(key, _)| key.text() == name).map(|(key, value)| (key, value))
}

/// The lines of the block of text that begins in or below `line`, and their indentation; `None` if it is not a block of
/// lines of its own (`key: |`).
fn cut(text: &str, line: u64) -> Option<(RangeInclusive<usize>, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    // The position of a block is that of its `|`, or of its first line.
    let near = usize::try_from(line).ok()?;
    let heads = [near, near.checked_sub(1)?].into_iter().filter(|head| *head > 0);
    let head = heads.into_iter().find(|head| lines.get(head - 1).copied().is_some_and(begins_block))?;
    let outer = indent(lines[head - 1]);
    let inside = lines[head..].iter().take_while(|line| line.trim().is_empty() || indent(line) > outer);
    let (mut last, mut least) = (None, usize::MAX);
    for (at, line) in inside.enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        (last, least) = (Some(head + 1 + at), least.min(indent(line)));
    }
    Some((head + 1..=last?, least))
}

/// Whether a line is a key with a block of text: `key: |`, `key: |-`, `key: |2`.
fn begins_block(line: &str) -> bool {
    let head = line.trim_end_matches(|c: char| c.is_ascii_digit() || c == '+' || c == '-');
    head.ends_with(": |")
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

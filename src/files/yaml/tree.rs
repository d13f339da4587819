//! The tree of a text: values with their positions.

use super::problem::{Position, Problem, Problems, shown};
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::options::{DuplicateKeyPolicy, MergeKeyPolicy, NonFiniteFloatPolicy};
use serde_saphyr::{Location, Span, Spanned};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

/// Values and keys of a document that are skipped.
#[derive(Clone, Debug, Default)]
pub struct LeftOut(HashSet<u32>);

impl LeftOut {
    /// Adds a node. Returns false if it was left out already.
    pub(super) fn add(&mut self, node: u32) -> bool {
        self.0.insert(node)
    }

    pub(super) fn contains(&self, node: &Node) -> bool {
        self.0.contains(&node.id)
    }

    /// The items of a list that are not left out.
    pub(super) fn items<'n>(&self, items: &'n [Node]) -> impl Iterator<Item = &'n Node> {
        items.iter().filter(move |node| !self.contains(node))
    }

    /// The entries of a mapping that are not left out.
    pub(super) fn entries<'n>(&self, entries: &'n [(Node, Node)]) -> impl Iterator<Item = &'n (Node, Node)> {
        entries.iter().filter(move |(key, value)| !self.contains(key) && !self.contains(value))
    }
}

/// Most values in a text: three times those of a simulated machine with ten thousand events.
const VALUES_MAX: usize = 250_000;
/// Most values that aliases may repeat.
const REPEATED_MAX: usize = 20_000;
/// Deepest nesting.
const DEPTH_MAX: usize = 32;

/// A value of the tree.
#[derive(Clone, Debug)]
pub(super) struct Node {
    /// Its number in the text.
    pub(super) id: u32,
    pub(super) place: Position,
    pub(super) value: Value,
    span: Span,
    /// A plain scalar's source text, for a field of text whose value YAML parses as a number:
    /// `nodeName: 0815`.
    source: Option<String>,
}

#[derive(Clone, Debug)]
pub(super) enum Value {
    Null,
    Bool(bool),
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Text(String),
    List(Vec<Node>),
    /// Keys are unique.
    Map(Vec<(Node, Node)>),
}

/// The type of a document's root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RootType<'n> {
    /// The document is empty.
    Nothing,
    /// A list.
    List,
    /// A mapping with these keys.
    Map(Vec<&'n str>),
    /// Text.
    Text,
    /// A number or a boolean.
    Scalar,
}

/// Parses a text. Repeated keys are not in the tree but added to `repeated`.
pub(super) fn parse(text: &str, repeated: &mut Problems) -> Result<Node, Problems> {
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! { max_nodes: VALUES_MAX, max_depth: DEPTH_MAX },
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: REPEATED_MAX },
        // The parser would report only the first repeated key.
        duplicate_keys: DuplicateKeyPolicy::PassThrough,
        merge_keys: MergeKeyPolicy::AsOrdinary,
        non_finite_float_policy: NonFiniteFloatPolicy::AsString,
        // `off` and `no` are strings, as in YAML 1.2; so are `0815` and `1_000`.
        strict_booleans: true,
        leading_zero_numbers_as_strings: true,
        underscored_numbers_as_strings: true,
        emit_comments: false,
        with_snippet: false,
    };
    let mut root: Node = serde_saphyr::from_str_with_options(text, options).map_err(|error| {
        let place = error.location().map(to_position);
        // The problem has its own position.
        let message = error.render_with_formatter(&serde_saphyr::UserMessageFormatter);
        let message = message.split(" at line ").next().unwrap_or(&message);
        let what = format!("this is not YAML: {message}");
        Problems::from_iter([Problem { place, key: String::new(), what }])
    })?;
    Completion { text, repeated, next_id: 0 }.complete(&mut root, "");
    Ok(root)
}

fn to_position(location: Location) -> Position {
    Position { line: location.line().max(1), column: location.column().max(1) }
}

/// Completes a tree as parsed: adds ids and source texts, and removes repeated keys.
struct Completion<'t> {
    text: &'t str,
    repeated: &'t mut Problems,
    /// The id of the next node.
    next_id: u32,
}

impl Completion<'_> {
    fn complete(&mut self, node: &mut Node, path: &str) {
        node.id = self.next_id;
        self.next_id += 1;
        match &mut node.value {
            Value::Text(_) => {}
            Value::List(items) => {
                for (at, item) in items.iter_mut().enumerate() {
                    self.complete(item, &format!("{path}[{at}]"));
                }
            }
            Value::Map(entries) => {
                let mut lines: HashMap<String, u64> = HashMap::with_capacity(entries.len());
                entries.retain_mut(|(key, value)| {
                    self.complete(key, path);
                    let text = key.text();
                    self.complete(value, &child_path(path, &text));
                    if let Some(line) = lines.get(&text) {
                        let what = format!("the key {} is given twice, first in line {line}", shown(&text));
                        self.repeated.push(Problem { place: Some(key.place), key: path.to_owned(), what });
                        return false;
                    }
                    lines.insert(text, key.place.line);
                    true
                });
            }
            Value::Null | Value::Bool(_) | Value::Unsigned(_) | Value::Signed(_) | Value::Float(_) => {
                node.source = source_text(self.text, node.span);
            }
        }
    }
}

impl Node {
    /// A scalar as text.
    pub(super) fn text(&self) -> String {
        match (&self.value, &self.source) {
            (Value::Text(text), _) | (_, Some(text)) => text.clone(),
            (Value::Bool(value), None) => value.to_string(),
            (Value::Unsigned(value), None) => value.to_string(),
            (Value::Signed(value), None) => value.to_string(),
            (Value::Float(value), None) => value.to_string(),
            (Value::Null | Value::List(_) | Value::Map(_), None) => String::new(),
        }
    }

    /// Whether the key has no value, as in `stack:`.
    pub(super) fn is_empty(&self) -> bool {
        matches!(self.value, Value::Null) && self.source.as_deref().is_none_or(str::is_empty)
    }

    pub(super) fn root_type(&self) -> RootType<'_> {
        match &self.value {
            Value::Null => RootType::Nothing,
            Value::List(_) => RootType::List,
            Value::Text(_) => RootType::Text,
            Value::Map(entries) => RootType::Map(
                entries
                    .iter()
                    .filter_map(|(key, _)| match &key.value {
                        Value::Text(text) => Some(text.as_str()),
                        _ => None,
                    })
                    .collect(),
            ),
            Value::Bool(_) | Value::Unsigned(_) | Value::Signed(_) | Value::Float(_) => RootType::Scalar,
        }
    }

    /// Visits this value and its descendants that are not left out, each with its path.
    pub(super) fn visit<'n>(&'n self, path: &str, left_out: &LeftOut, visit: &mut dyn FnMut(&str, &'n Node)) {
        visit(path, self);
        match &self.value {
            Value::List(items) => {
                for (at, item) in left_out.items(items).enumerate() {
                    item.visit(&format!("{path}[{at}]"), left_out, visit);
                }
            }
            Value::Map(entries) => {
                for (key, value) in left_out.entries(entries) {
                    // Problems of a key are reported with the path of its mapping.
                    visit(path, key);
                    value.visit(&child_path(path, &key.text()), left_out, visit);
                }
            }
            _ => {}
        }
    }

    /// Adds the scalars of this value by their paths. Keys without a value are absent.
    pub(super) fn collect_scalars(&self, path: &str, scalars: &mut BTreeMap<String, String>) {
        let text = match &self.value {
            Value::List(items) if !items.is_empty() => {
                for (at, item) in items.iter().enumerate() {
                    item.collect_scalars(&format!("{path}[{at}]"), scalars);
                }
                return;
            }
            Value::Map(entries) if !entries.is_empty() => {
                for (key, value) in entries {
                    value.collect_scalars(&child_path(path, &key.text()), scalars);
                }
                return;
            }
            Value::List(_) => "[]".to_owned(),
            Value::Map(_) => "{}".to_owned(),
            Value::Null => return,
            _ => self.text(),
        };
        // The root has no path.
        if !path.is_empty() {
            scalars.insert(path.to_owned(), text);
        }
    }

    /// This node, or a value or key below it, by id, with its path.
    pub(super) fn find(&self, id: u32) -> Option<(String, &Self)> {
        let mut found = None;
        self.visit("", &LeftOut::default(), &mut |path, node| {
            if node.id == id {
                found = Some((path.to_owned(), node));
            }
        });
        found
    }
}

/// The path of a key. A key with other characters is quoted: `resources["nvidia.com/gpu"]`.
fn child_path(path: &str, key: &str) -> String {
    let is_plain =
        (1..=64).contains(&key.len()) && key.chars().all(|c| c.is_alphanumeric() || c == '_' || c == '-');
    match (is_plain, path) {
        (true, "") => key.to_owned(),
        (true, _) => format!("{path}.{key}"),
        (false, _) => format!("{path}[{}]", shown(key)),
    }
}

fn source_text(text: &str, span: Span) -> Option<String> {
    let from = usize::try_from(span.byte_offset()?).ok()?;
    let bytes = usize::try_from(span.byte_len()?).ok()?;
    text.get(from..from.checked_add(bytes)?).map(|source| source.trim().to_owned())
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Spanned { value, referenced, defined } = Spanned::deserialize(deserializer)?;
        Ok(Self { id: 0, place: to_position(referenced), value, span: defined.span(), source: None })
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AnyValue;
        impl<'de> Visitor<'de> for AnyValue {
            type Value = Value;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value")
            }
            fn visit_unit<E>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }
            fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
                Ok(Value::Bool(value))
            }
            fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
                Ok(Value::Unsigned(value))
            }
            fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
                Ok(Value::Signed(value))
            }
            fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
                Ok(Value::Float(value))
            }
            fn visit_str<E>(self, value: &str) -> Result<Value, E> {
                Ok(Value::Text(value.to_owned()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = list.next_element()? {
                    items.push(item);
                }
                Ok(Value::List(items))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Value::Map(entries))
            }
        }
        deserializer.deserialize_any(AnyValue)
    }
}

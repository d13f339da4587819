//! Deserializes types from a tree. An error has the node of the invalid value or key, so that the next
//! attempt can leave it out.

use super::problem::{list, plain, shown, suggestion};
use super::tree::{LeftOut, Node, Value};
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, Error, Expected, IntoDeserializer, MapAccess, SeqAccess,
    Unexpected, Visitor,
};
use serde::forward_to_deserialize_any;
use std::fmt;

/// Deserializes a value from the tree, without the nodes that are left out.
pub(super) fn value<T: DeserializeOwned>(root: &Node, left_out: &LeftOut) -> Result<T, Fault> {
    T::deserialize(Reader { node: root, left_out })
}

/// Why a value could not be deserialized.
#[derive(Debug)]
pub(super) struct Fault {
    /// The value or the key; `None` until [`Fault::at`].
    pub(super) node: Option<u32>,
    pub(super) what: String,
    /// The key that a mapping lacks, if that is the fault.
    missing: Option<&'static str>,
}

impl Fault {
    /// Adds the node, unless an inner value has been added.
    fn at(mut self, node: &Node) -> Self {
        self.node.get_or_insert(node.id);
        self
    }

    /// Whether a key is missing in `node` only because it or its value was left out.
    pub(super) fn is_of_left_out(&self, node: &Node, left_out: &LeftOut) -> bool {
        let (Some(missing), Value::Map(entries)) = (self.missing, &node.value) else { return false };
        let is_left_out = |key, value| left_out.contains(value) || left_out.contains(key);
        entries.iter().any(|(key, value)| is_left_out(key, value) && key.text() == missing)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for Fault {}

impl Error for Fault {
    fn custom<T: fmt::Display>(what: T) -> Self {
        Self { node: None, what: what.to_string(), missing: None }
    }
    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::custom(format!("found {}; expected {}", found_text(&found), plain(&expected.to_string())))
    }
    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::invalid_type(found, expected)
    }
    fn invalid_length(length: usize, expected: &dyn Expected) -> Self {
        Self::custom(format!("found {length} values; expected {}", plain(&expected.to_string())))
    }
    fn unknown_variant(name: &str, known: &'static [&'static str]) -> Self {
        Self::custom(format!("{} is not known{}", shown(name), suggestion(name, known)))
    }
    fn unknown_field(key: &str, known: &'static [&'static str]) -> Self {
        Self::custom(format!("the key {} is not known{}", shown(key), suggestion(key, known)))
    }
    fn missing_field(key: &'static str) -> Self {
        Self { missing: Some(key), ..Self::custom(format!("the key `{key}` is missing")) }
    }
    fn duplicate_field(key: &'static str) -> Self {
        Self::custom(format!("the key `{key}` is given twice"))
    }
}

/// The value that was found, as in the file.
fn found_text(found: &Unexpected<'_>) -> String {
    match found {
        Unexpected::Bool(value) => value.to_string(),
        Unexpected::Unsigned(value) => value.to_string(),
        Unexpected::Signed(value) => value.to_string(),
        Unexpected::Float(value) => value.to_string(),
        Unexpected::Str(text) => shown(text),
        Unexpected::Unit | Unexpected::Option => "nothing".into(),
        Unexpected::Seq => "a list".into(),
        Unexpected::Map => "a mapping".into(),
        other => other.to_string(),
    }
}

#[derive(Clone, Copy)]
struct Reader<'n> {
    node: &'n Node,
    left_out: &'n LeftOut,
}

impl<'n> Reader<'n> {
    fn at(self, node: &'n Node) -> Self {
        Self { node, ..self }
    }

    fn any<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        match &self.node.value {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Unsigned(value) => visitor.visit_u64(*value),
            Value::Signed(value) => visitor.visit_i64(*value),
            Value::Float(value) => visitor.visit_f64(*value),
            Value::Text(text) => visitor.visit_str(text),
            Value::List(items) => visitor.visit_seq(List { reader: self, items: items.iter() }),
            Value::Map(entries) => {
                visitor.visit_map(Map { reader: self, entries: entries.iter(), value: None })
            }
        }
    }

    /// A scalar as in the file, since a name may look like a number.
    fn scalar_text(self) -> Result<String, Fault> {
        let text = self.node.text();
        // Keys of several lines have line ends; other control characters could affect a terminal.
        match text.chars().find(|c| c.is_control() && !matches!(c, '\n' | '\r' | '\t')) {
            Some(c) => Err(Fault::custom(format!("the text holds the control character {c:?}"))),
            None => Ok(text),
        }
    }

    fn is_scalar(self) -> bool {
        !matches!(self.node.value, Value::Null | Value::List(_) | Value::Map(_))
    }

    fn unexpected(self) -> Unexpected<'n> {
        match &self.node.value {
            Value::Null => Unexpected::Unit,
            Value::Bool(value) => Unexpected::Bool(*value),
            Value::Unsigned(value) => Unexpected::Unsigned(*value),
            Value::Signed(value) => Unexpected::Signed(*value),
            Value::Float(value) => Unexpected::Float(*value),
            Value::Text(text) => Unexpected::Str(text),
            Value::List(_) => Unexpected::Seq,
            Value::Map(_) => Unexpected::Map,
        }
    }
}

impl<'de, 'n> Deserializer<'de> for Reader<'n> {
    type Error = Fault;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        self.any(visitor).map_err(|fault| fault.at(self.node))
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        let value = match self.is_scalar() {
            true => self.scalar_text().and_then(|text| visitor.visit_string(text)),
            false => self.any(visitor),
        };
        value.map_err(|fault| fault.at(self.node))
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        self.deserialize_str(visitor)
    }

    fn deserialize_identifier<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        self.deserialize_str(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        match self.node.value {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Fault> {
        visitor.visit_newtype_struct(self)
    }

    /// `stack:` without a value is an empty list.
    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        match self.node.is_empty() {
            true => visitor.visit_seq(List { reader: self, items: [].iter() }),
            false => self.any(visitor),
        }
        .map_err(|fault| fault.at(self.node))
    }

    /// `parameters:` without a value is an empty mapping.
    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        match self.node.is_empty() {
            true => visitor.visit_map(Map { reader: self, entries: [].iter(), value: None }),
            false => self.any(visitor),
        }
        .map_err(|fault| fault.at(self.node))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        keys: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        // serde would accept a list as the values of the fields in the order of their declaration.
        if self.node.is_empty() || matches!(self.node.value, Value::Map(_)) {
            return self.deserialize_map(visitor);
        }
        let expected = format!("a mapping with keys such as {}", list(keys));
        Err(Fault::invalid_type(self.unexpected(), &expected.as_str()).at(self.node))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        names: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        let value = match self.is_scalar() {
            // The variants of such enums have no fields.
            true => self.scalar_text().and_then(|text| visitor.visit_enum(text.into_deserializer())),
            false => {
                let expected = format!("one of {}", list(names));
                Err(Fault::invalid_type(self.unexpected(), &expected.as_str()))
            }
        };
        value.map_err(|fault| fault.at(self.node))
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        visitor.visit_unit()
    }

    forward_to_deserialize_any! {
        bool char i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 bytes byte_buf unit unit_struct tuple tuple_struct
    }
}

struct List<'n> {
    reader: Reader<'n>,
    items: std::slice::Iter<'n, Node>,
}

impl<'de> SeqAccess<'de> for List<'_> {
    type Error = Fault;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Fault> {
        let left_out = self.reader.left_out;
        let Some(node) = self.items.find(|node| !left_out.contains(node)) else { return Ok(None) };
        seed.deserialize(self.reader.at(node)).map(Some).map_err(|fault| fault.at(node))
    }
}

struct Map<'n> {
    reader: Reader<'n>,
    entries: std::slice::Iter<'n, (Node, Node)>,
    /// The value of the last key.
    value: Option<&'n Node>,
}

impl<'de> MapAccess<'de> for Map<'_> {
    type Error = Fault;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Fault> {
        let left_out = self.reader.left_out;
        let next = self.entries.find(|(key, value)| !left_out.contains(key) && !left_out.contains(value));
        let Some((key, value)) = next else { return Ok(None) };
        self.value = Some(value);
        seed.deserialize(self.reader.at(key)).map(Some).map_err(|fault| fault.at(key))
    }

    fn next_value_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<T::Value, Fault> {
        let Some(node) = self.value.take() else {
            return Err(Fault::custom("a value was requested before its key"));
        };
        seed.deserialize(self.reader.at(node)).map_err(|fault| fault.at(node))
    }
}

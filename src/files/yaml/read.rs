//! Types from a tree. An error carries the value or the key that is to blame, so that it can be left out and the
//! rest be read.

use super::message::{Fault, Kind, list};
use super::tree::{Node, Value};
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, EnumAccess, Error as _, MapAccess, SeqAccess,
    Unexpected, VariantAccess, Visitor,
};
use serde::forward_to_deserialize_any;
use std::collections::HashSet;

/// Values and keys of a document that are not read.
#[derive(Clone, Debug, Default)]
pub struct LeftOut(HashSet<u32>);

impl LeftOut {
    /// Whether it was not left out yet.
    pub(super) fn add(&mut self, node: u32) -> bool {
        self.0.insert(node)
    }

    fn has(&self, node: &Node) -> bool {
        self.0.contains(&node.id)
    }

    /// The items of a list that are read.
    pub(super) fn items<'n>(&self, items: &'n [Node]) -> impl Iterator<Item = &'n Node> {
        items.iter().filter(move |node| !self.has(node))
    }

    /// The entries of a mapping that are read.
    pub(super) fn entries<'n>(&self, entries: &'n [(Node, Node)]) -> impl Iterator<Item = &'n (Node, Node)> {
        entries.iter().filter(move |(key, value)| !self.has(key) && !self.has(value))
    }
}

/// Reads a value from the tree, less what is left out.
pub(super) fn value<T: DeserializeOwned>(root: &Node, left_out: &LeftOut) -> Result<T, Fault> {
    T::deserialize(Reader { node: root, left_out })
}

/// Whether a key is missing only because its value was left out.
pub(super) fn follows(kind: &Kind, node: &Node, left_out: &LeftOut) -> bool {
    let (Kind::Missing(missing), Value::Map(entries)) = (kind, &node.value) else { return false };
    entries.iter().any(|(key, value)| (left_out.has(value) || left_out.has(key)) && key.text() == *missing)
}

#[derive(Clone, Copy)]
struct Reader<'n> {
    node: &'n Node,
    left_out: &'n LeftOut,
}

impl<'n> Reader<'n> {
    fn other(self, node: &'n Node) -> Self {
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

    /// A scalar as it is written, since a name may look like a number.
    fn text<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        match &self.node.value {
            Value::Null | Value::List(_) | Value::Map(_) => self.any(visitor),
            _ => {
                let text = self.node.text();
                // Line ends are in keys of several lines; what else controls a terminal has no use in a setting.
                match text.chars().find(|c| c.is_control() && !matches!(c, '\n' | '\r' | '\t')) {
                    Some(c) => Err(Fault::other(format!("the text holds the control character {c:?}"))),
                    None => visitor.visit_string(text),
                }
            }
        }
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
        self.text(visitor).map_err(|fault| fault.at(self.node))
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        self.deserialize_str(visitor)
    }

    fn deserialize_char<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
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

    /// `stack:` with nothing behind it is an empty list.
    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        match self.node.is_empty() {
            true => visitor.visit_seq(List { reader: self, items: [].iter() }),
            false => self.any(visitor),
        }
        .map_err(|fault| fault.at(self.node))
    }

    /// `parameters:` with nothing behind it is an empty mapping.
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
        // A list would be taken as the values of the keys, in the order of the program's source.
        if self.node.is_empty() || matches!(self.node.value, Value::Map(_)) {
            return self.deserialize_map(visitor);
        }
        let expected = format!("a mapping with keys such as {}", list(keys));
        Err(Fault::invalid_type(self.unexpected(), &expected.as_str()).at(self.node))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        words: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        let fault = match self.node.value {
            Value::Null | Value::List(_) | Value::Map(_) => {
                let expected = format!("one of {}", list(words));
                Fault::invalid_type(self.unexpected(), &expected.as_str())
            }
            _ => match visitor.visit_enum(EnumValue(self)) {
                Ok(value) => return Ok(value),
                Err(fault) => fault,
            },
        };
        Err(fault.at(self.node))
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        visitor.visit_unit()
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 bytes byte_buf unit unit_struct tuple tuple_struct
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
        let Some(node) = self.items.find(|node| !left_out.has(node)) else { return Ok(None) };
        seed.deserialize(self.reader.other(node)).map(Some).map_err(|fault| fault.at(node))
    }
}

struct Map<'n> {
    reader: Reader<'n>,
    entries: std::slice::Iter<'n, (Node, Node)>,
    /// The value of the key that was read last.
    value: Option<&'n Node>,
}

impl<'de> MapAccess<'de> for Map<'_> {
    type Error = Fault;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Fault> {
        let left_out = self.reader.left_out;
        let next = self.entries.find(|(key, value)| !left_out.has(key) && !left_out.has(value));
        let Some((key, value)) = next else { return Ok(None) };
        self.value = Some(value);
        seed.deserialize(self.reader.other(key)).map(Some).map_err(|fault| fault.at(key))
    }

    fn next_value_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<T::Value, Fault> {
        let Some(node) = self.value.take() else {
            return Err(Fault::custom("a value was asked for before its key"));
        };
        seed.deserialize(self.reader.other(node)).map_err(|fault| fault.at(node))
    }
}

/// An enum's value, which is a word.
struct EnumValue<'n>(Reader<'n>);

impl<'de> EnumAccess<'de> for EnumValue<'_> {
    type Error = Fault;
    type Variant = Self;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Self), Fault> {
        Ok((seed.deserialize(self.0)?, self))
    }
}

impl<'de> VariantAccess<'de> for EnumValue<'_> {
    type Error = Fault;

    fn unit_variant(self) -> Result<(), Fault> {
        Ok(())
    }
    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, _: T) -> Result<T::Value, Fault> {
        Err(Fault::custom("expected a mapping, found a single value"))
    }
    fn tuple_variant<V: Visitor<'de>>(self, _: usize, _: V) -> Result<V::Value, Fault> {
        Err(Fault::custom("expected a mapping, found a single value"))
    }
    fn struct_variant<V: Visitor<'de>>(self, _: &'static [&'static str], _: V) -> Result<V::Value, Fault> {
        Err(Fault::custom("expected a mapping, found a single value"))
    }
}

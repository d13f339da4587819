//! Deserializes types from a tree. An error has the node of the invalid value or key, so that the next
//! attempt can leave it out.

use super::message::{Fault, Kind, list};
use super::tree::{Node, Value};
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, EnumAccess, Error as _, MapAccess, SeqAccess,
    Unexpected, VariantAccess, Visitor,
};
use serde::forward_to_deserialize_any;
use std::collections::HashSet;

/// Values and keys of a document that are skipped.
#[derive(Clone, Debug, Default)]
pub struct LeftOut(HashSet<u32>);

impl LeftOut {
    /// Adds a node. Returns false if it was left out already.
    pub(super) fn add(&mut self, node: u32) -> bool {
        self.0.insert(node)
    }

    fn contains(&self, node: &Node) -> bool {
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

/// Deserializes a value from the tree, without the nodes that are left out.
pub(super) fn value<T: DeserializeOwned>(root: &Node, left_out: &LeftOut) -> Result<T, Fault> {
    T::deserialize(Reader { node: root, left_out })
}

/// Whether a key is missing only because it or its value was left out.
pub(super) fn is_left_out(kind: &Kind, node: &Node, left_out: &LeftOut) -> bool {
    let (Kind::Missing(missing), Value::Map(entries)) = (kind, &node.value) else { return false };
    entries
        .iter()
        .any(|(key, value)| (left_out.contains(value) || left_out.contains(key)) && key.text() == *missing)
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
    fn text<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        match &self.node.value {
            Value::Null | Value::List(_) | Value::Map(_) => self.any(visitor),
            _ => {
                let text = self.node.text();
                // Keys of several lines have line ends; other control characters could affect a terminal.
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
        let fault = match self.node.value {
            Value::Null | Value::List(_) | Value::Map(_) => {
                let expected = format!("one of {}", list(names));
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

/// The value of an enum whose variants have no fields.
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

//! Closed lists of values, such as the states of a GPU.

/// Defines the enum of a list of values, with their spelling in JSON. A later release may add values: a client reads
/// one that it does not know as `Other`, which the server never sends and the API's description leaves out. With
/// `from`, it is converted from the kernel's enum, whose variants have the same names.
macro_rules! values {
    (
        $(#[doc = $doc:literal])+
        $name:ident from $kernel:ty {
            $($(#[doc = $about:literal])+ $value:ident = $text:literal,)+
        }
    ) => {
        values! {
            $(#[doc = $doc])+
            $name {
                $($(#[doc = $about])+ $value = $text,)+
            }
        }

        impl From<&$kernel> for $name {
            fn from(value: &$kernel) -> Self {
                type Kernel = $kernel;
                match value {
                    $(Kernel::$value { .. } => Self::$value,)+
                }
            }
        }
    };
    (
        $(#[doc = $doc:literal])+
        $name:ident {
            $($(#[doc = $about:literal])+ $value:ident = $text:literal,)+
        }
    ) => {
        $(#[doc = $doc])+
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Deserialize)]
        #[serde(from = "String")]
        pub enum $name {
            $($(#[doc = $about])+ $value,)+
            /// A value of a later release.
            Other(String),
        }

        impl $name {
            /// The spelling of each value.
            pub const NAMES: &[&str] = &[$($text,)+];

            /// Its spelling.
            #[must_use]
            pub fn as_str(&self) -> &str {
                match self {
                    $(Self::$value => $text,)+
                    Self::Other(text) => text,
                }
            }

            /// The value with this spelling; `None` if it is unknown.
            #[must_use]
            pub fn parse(text: &str) -> Option<Self> {
                match text {
                    $($text => Some(Self::$value),)+
                    _ => None,
                }
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                Self::parse(&text).unwrap_or(Self::Other(text))
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.as_str())
            }
        }

        // Derived, it would have `Other`.
        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
                utoipa::openapi::ObjectBuilder::new()
                    .schema_type(utoipa::openapi::Type::String)
                    .description(Some(concat!($($doc,)+ "\n", $("\n- `", $text, "`:", $($about,)+)+).trim()))
                    .enum_values(Some(Self::NAMES.iter().copied()))
                    .into()
            }
        }

        impl utoipa::ToSchema for $name {}
    };
}

/// Converts an enum of requests to the kernel's enum with the same variants, and back.
macro_rules! same_variants {
    ($name:ident = $kernel:ty { $($value:ident),+ }) => {
        impl From<$kernel> for $name {
            fn from(value: $kernel) -> Self {
                type Kernel = $kernel;
                match value {
                    $(Kernel::$value => Self::$value,)+
                }
            }
        }

        impl From<$name> for $kernel {
            fn from(value: $name) -> Self {
                match value {
                    $($name::$value => Self::$value,)+
                }
            }
        }
    };
}
pub(crate) use {same_variants, values};

#[cfg(test)]
mod tests {
    use crate::HealthState;
    use utoipa::PartialSchema;

    #[test]
    fn a_value_of_a_later_release_is_read_and_is_not_described() {
        for text in ["\"degraded\"", "\"quarantined\""] {
            let state: HealthState = serde_json::from_str(text).unwrap();
            assert_eq!(serde_json::to_string(&state).unwrap(), text);
        }
        assert_eq!(HealthState::parse("quarantined"), None);
        let schema = serde_json::to_value(HealthState::schema()).unwrap();
        assert_eq!(schema["enum"], serde_json::json!(["healthy", "degraded", "unhealthy", "vanished"]));
    }
}

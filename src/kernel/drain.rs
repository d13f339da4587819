//! Whether an operator lets a GPU be granted.

/// The drain state of one GPU, in kubectl's words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Drain {
    /// Granted as offered.
    #[default]
    Active,
    /// Nothing new is granted; what is held stays (I3, I4).
    Cordoned(Mark),
}

/// Who did it, when and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Who: the token's name, or `config`.
    pub by: String,
    /// Why, in the operator's words; may be empty.
    pub why: String,
    /// When, milliseconds since 1970.
    pub since_wall_ms: u64,
}

impl Drain {
    /// As the API writes it.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Cordoned(_) => "cordoned",
        }
    }
}

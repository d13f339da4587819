//! What the rounds found.

use std::fmt;

/// What is wrong with a state after a restart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// Something that was acknowledged is not there, or is not what was acknowledged.
    Lost(String),
    /// Held twice.
    Double(String),
    /// Something is there that nothing explains.
    Mismatch(String),
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, what) = match self {
            Self::Lost(what) => ("lost", what),
            Self::Double(what) => ("double", what),
            Self::Mismatch(what) => ("mismatch", what),
        };
        write!(f, "{kind}: {what}")
    }
}

/// Rounds and what they found. Its `Display` is the last line of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Restarts or power cuts.
    pub rounds: u64,
    /// Acknowledged, and not there.
    pub lost: u64,
    /// Held twice.
    pub double: u64,
    /// There, and unexplained.
    pub mismatch: u64,
}

impl Tally {
    /// Counts it.
    pub fn count(&mut self, wrong: &Wrong) {
        match wrong {
            Wrong::Lost(_) => self.lost += 1,
            Wrong::Double(_) => self.double += 1,
            Wrong::Mismatch(_) => self.mismatch += 1,
        }
    }

    /// Adds another run's counts.
    pub fn add(&mut self, other: &Self) {
        self.rounds += other.rounds;
        self.lost += other.lost;
        self.double += other.double;
        self.mismatch += other.mismatch;
    }

    /// Whether nothing was wrong.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        (self.lost, self.double, self.mismatch) == (0, 0, 0)
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rounds, lost, double, mismatch } = self;
        write!(f, "rounds={rounds} lost={lost} double={double} mismatch={mismatch}")
    }
}

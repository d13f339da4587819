//! Chance that a seed repeats.

/// SplitMix64.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The same seed gives the same numbers.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Any number.
    pub fn next_number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number from 0 up to and without `end`, which is over 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next_number() % end
    }

    /// True in `percent` of cases.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// One of these; there must be one.
    pub fn pick<'t, T>(&mut self, of: &'t [T]) -> &'t T {
        // The remainder is below a length, which is a usize.
        &of[usize::try_from(self.below(of.len() as u64)).unwrap_or(0)]
    }
}

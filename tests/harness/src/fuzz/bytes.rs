//! Choices from the bytes of an input. At their end every choice is the first one, so that an input is
//! never too short.

/// What is left of an input.
pub(super) struct Bytes<'d>(&'d [u8]);

impl<'d> Bytes<'d> {
    pub(super) fn new(data: &'d [u8]) -> Self {
        Self(data)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn byte(&mut self) -> u8 {
        match self.0.split_first() {
            Some((first, rest)) => {
                self.0 = rest;
                *first
            }
            None => 0,
        }
    }

    pub(super) fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// True for one byte in so many, zero among them.
    pub(super) fn one_in(&mut self, of: u8) -> bool {
        self.byte().is_multiple_of(of)
    }

    /// 0 to `end` - 1.
    pub(super) fn below(&mut self, end: usize) -> usize {
        usize::from(self.byte()) % end.max(1)
    }

    pub(super) fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())].clone()
    }

    pub(super) fn number(&mut self) -> u64 {
        (0..8).fold(0, |number, _| number << 8 | u64::from(self.byte()))
    }

    /// A small number, one at an edge, or any.
    pub(super) fn memory_mib(&mut self) -> u64 {
        match self.byte() % 8 {
            0 => u64::MAX,
            1 => self.number(),
            2 => 81_921,
            3 => 81_920,
            _ => u64::from(self.byte()) * 512,
        }
    }

    pub(super) fn percent(&mut self) -> u32 {
        match self.byte() % 8 {
            0 => u32::MAX,
            1 => 101,
            _ => u32::from(self.byte()) % 101,
        }
    }

    /// A text of the input's own bytes, and at times one that is too long.
    pub(super) fn text(&mut self) -> String {
        let length = usize::from(self.byte());
        if length == 255 {
            return "x".repeat(1_025);
        }
        let (text, rest) = self.0.split_at(length.min(self.0.len()));
        self.0 = rest;
        String::from_utf8_lossy(text).into_owned()
    }
}

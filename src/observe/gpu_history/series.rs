//! One value over the last 24 hours, as averages of equal slots in a fixed amount of memory.

/// Length of a slot of the last hour, milliseconds.
pub(super) const FINE_MS: u64 = 15_000;
/// Slots of the last hour.
pub(super) const FINE_SLOTS: usize = 240;
/// Length of a slot of the last 24 hours, milliseconds.
pub(super) const COARSE_MS: u64 = 120_000;
/// Slots of the last 24 hours.
pub(super) const COARSE_SLOTS: usize = 720;
/// Slots of a series.
pub(super) const SLOTS: usize = FINE_SLOTS + COARSE_SLOTS;

/// An unsigned integer whose largest value stands for "no value".
pub(super) trait Slot: Copy {
    /// No value.
    const EMPTY: Self;

    /// The value, cut to the largest one that can be stored.
    fn store(value: u64) -> Self;

    /// The value; `None` if there is none.
    fn load(self) -> Option<u64>;
}

macro_rules! slots {
    ($($integer:ty),+) => {
        $(impl Slot for $integer {
            const EMPTY: Self = <$integer>::MAX;

            fn store(value: u64) -> Self {
                <$integer>::try_from(value).unwrap_or(Self::EMPTY).min(Self::EMPTY - 1)
            }

            fn load(self) -> Option<u64> {
                (self != Self::EMPTY).then(|| u64::from(self))
            }
        })+
    };
}
slots!(u8, u16, u32);

/// The newest slots of one length. Without a value it takes no memory for slots.
#[derive(Clone, Debug, Default)]
struct Ring<T> {
    /// The slot with number `n` is at `n` modulo the length.
    slots: Box<[T]>,
    /// The number of the newest slot.
    newest: u64,
    /// Sum and number of the values of the newest slot.
    sum: u64,
    count: u32,
}

impl<T: Slot> Ring<T> {
    /// Adds a value to a slot. One of an older slot than the newest is ignored.
    fn add(&mut self, capacity: usize, slot: u64, value: u64) {
        if self.slots.is_empty() {
            self.slots = vec![T::EMPTY; capacity].into();
            self.newest = slot;
        }
        if slot < self.newest {
            return;
        }
        if slot > self.newest {
            let skipped = (slot - self.newest).min(self.len());
            for passed in 0..skipped {
                let at = self.position(slot - passed);
                self.slots[at] = T::EMPTY;
            }
            (self.newest, self.sum, self.count) = (slot, 0, 0);
        }
        self.sum = self.sum.saturating_add(value);
        self.count = self.count.saturating_add(1);
        let count = u64::from(self.count);
        let at = self.position(slot);
        self.slots[at] = T::store(self.sum.saturating_add(count / 2) / count);
    }

    /// The average of a slot; `None` without a value, and for slots that are not kept.
    fn get(&self, slot: u64) -> Option<u64> {
        let is_kept = slot <= self.newest && self.newest - slot < self.len();
        if is_kept { self.slots.get(self.position(slot))?.load() } else { None }
    }

    fn len(&self) -> u64 {
        self.slots.len() as u64
    }

    fn position(&self, slot: u64) -> usize {
        usize::try_from(slot % self.len().max(1)).unwrap_or(0)
    }
}

/// One value over the last 24 hours. Its slots take at most [`SLOTS`] times the size of `T`, and nothing before the
/// first value.
#[derive(Clone, Debug, Default)]
pub(super) struct Series<T> {
    fine: Ring<T>,
    coarse: Ring<T>,
}

impl<T: Slot> Series<T> {
    /// Adds a value that was read at this time. Times that go back by more than a slot are ignored.
    pub(super) fn add(&mut self, at_ms: u64, value: u64) {
        self.fine.add(FINE_SLOTS, at_ms / FINE_MS, value);
        self.coarse.add(COARSE_SLOTS, at_ms / COARSE_MS, value);
    }

    /// The average of one step; `None` if it has no value.
    pub(super) fn average(&self, step: Step) -> Option<u64> {
        let (ring, length_ms) = if step.is_fine { (&self.fine, FINE_MS) } else { (&self.coarse, COARSE_MS) };
        let first = step.start_ms / length_ms;
        let slots = first..first + step.length_ms / length_ms;
        let (sum, count) = slots
            .filter_map(|slot| ring.get(slot))
            .fold((0_u64, 0_u64), |(sum, count), value| (sum.saturating_add(value), count + 1));
        (count > 0).then(|| (sum + count / 2) / count)
    }

    /// Bytes of its slots.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        (self.fine.slots.len() + self.coarse.slots.len()) * size_of::<T>()
    }
}

/// A step of an answer: some slots, whose average is one point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Step {
    /// Its start, milliseconds of the series' clock.
    pub(super) start_ms: u64,
    /// Its length, milliseconds: a multiple of that of its slots.
    pub(super) length_ms: u64,
    /// Whether its slots are those of the last hour.
    is_fine: bool,
}

/// The steps of the last `last_ms` up to `now_ms`, oldest first: at most `points`, as short as the slots allow.
pub(super) fn steps(now_ms: u64, last_ms: u64, points: u64) -> Vec<Step> {
    let is_fine = last_ms <= FINE_MS * FINE_SLOTS as u64;
    let slot_ms = if is_fine { FINE_MS } else { COARSE_MS };
    let length_ms = last_ms.div_ceil(points.max(1)).next_multiple_of(slot_ms);
    let count = last_ms.div_ceil(length_ms);
    let newest = now_ms / length_ms;
    // Within the first hours of the clock there are fewer steps.
    let oldest = (newest + 1).saturating_sub(count);
    (oldest..=newest).map(|step| Step { start_ms: step * length_ms, length_ms, is_fine }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR_MS: u64 = 3_600_000;
    const START_MS: u64 = 1_000 * 24 * HOUR_MS;

    fn values(series: &Series<u32>, now_ms: u64, last_ms: u64, points: u64) -> Vec<Option<u64>> {
        steps(now_ms, last_ms, points).into_iter().map(|step| series.average(step)).collect()
    }

    #[test]
    fn the_last_hour_is_kept_by_15_seconds_and_the_day_by_two_minutes() {
        let mut series = Series::<u32>::default();
        // Every 5 s for 30 h: the number of the scan.
        let end = 30 * HOUR_MS;
        for at in (0..end).step_by(5_000) {
            series.add(START_MS + at, at / 5_000);
        }
        let now = START_MS + end - 1;
        let hour = values(&series, now, HOUR_MS, 240);
        let newest = end / 5_000 - 1;
        assert_eq!(hour.len(), 240);
        assert_eq!(hour.last().unwrap(), &Some(newest - 1), "the average of the last three scans");
        assert!(hour.windows(2).all(|pair| pair[1].unwrap() - pair[0].unwrap() == 3));
        let day = values(&series, now, 24 * HOUR_MS, 720);
        assert_eq!((day.len(), day.iter().flatten().count()), (720, 720));
        assert!(day.windows(2).all(|pair| pair[1].unwrap() - pair[0].unwrap() == 24));
        // Fewer points: longer steps of equal length, with the averages of their slots.
        let steps_of_day = steps(now, 24 * HOUR_MS, 240);
        assert_eq!((steps_of_day.len(), steps_of_day[0].length_ms), (240, 360_000));
        let averages = values(&series, now, 24 * HOUR_MS, 240);
        let three: Vec<_> = day.chunks(3).map(|all| all.iter().flatten().sum::<u64>() / 3).collect();
        assert_eq!(averages.into_iter().flatten().collect::<Vec<_>>(), three);
    }

    #[test]
    fn there_are_never_more_points_than_requested() {
        for last in [60_000, 900_000, HOUR_MS, HOUR_MS + 1, 3 * HOUR_MS, 24 * HOUR_MS] {
            for points in [1, 2, 7, 240, 720] {
                let all = steps(START_MS + 12_345, last, points);
                assert!((1..=points).contains(&(all.len() as u64)), "{last} {points}: {}", all.len());
                assert!(all.windows(2).all(|two| two[1].start_ms - two[0].start_ms == two[0].length_ms));
                let (first, newest) = (all[0].start_ms, all[all.len() - 1]);
                assert!(newest.start_ms + newest.length_ms > START_MS + 12_345);
                assert!(START_MS + 12_345 - first < last + newest.length_ms, "{last} {points}");
            }
        }
        assert_eq!(steps(30_000, HOUR_MS, 240).len(), 3, "the clock has just started");
    }

    #[test]
    fn gaps_are_empty_and_a_gap_of_a_day_leaves_nothing() {
        let mut series = Series::<u32>::default();
        series.add(START_MS, 7);
        series.add(START_MS + 60_000, 9);
        let now = START_MS + 60_000;
        assert_eq!(values(&series, now, 75_000, 5), [Some(7), None, None, None, Some(9)]);
        assert_eq!(values(&series, now, 75_000, 1), [Some(8)]);
        series.add(START_MS + 25 * HOUR_MS, 1);
        let now = START_MS + 25 * HOUR_MS;
        assert_eq!(values(&series, now, 24 * HOUR_MS, 720).into_iter().flatten().collect::<Vec<_>>(), [1]);
        assert_eq!(values(&series, now, HOUR_MS, 240).into_iter().flatten().collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn a_clock_that_goes_back_changes_nothing() {
        let mut series = Series::<u32>::default();
        series.add(START_MS, 10);
        series.add(START_MS - 10 * HOUR_MS, 99);
        series.add(START_MS + 1, 20);
        assert_eq!(values(&series, START_MS + 1, 15_000, 1), [Some(15)]);
        let earlier = values(&series, START_MS - 9 * HOUR_MS, 2 * HOUR_MS, 720);
        assert_eq!(earlier.into_iter().flatten().count(), 0);
    }

    #[test]
    fn large_values_are_cut_and_the_largest_stands_for_none() {
        assert_eq!(u8::store(254).load(), Some(254));
        assert_eq!(u8::store(255).load(), Some(254));
        assert_eq!(u16::store(u64::MAX).load(), Some(65_534));
        assert_eq!(u8::EMPTY.load(), None);
        let series = Series::<u32>::default();
        assert_eq!((series.bytes(), values(&series, START_MS, HOUR_MS, 240).len()), (0, 240));
    }
}

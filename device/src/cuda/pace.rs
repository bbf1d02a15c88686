//! How fast copies arrive, to know when to look for the next one.

use std::time::{Duration, Instant};

/// Of how many copies the rate is the mean.
const COPIES: f64 = 8.0;

/// The pace of a queue of copies.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Bytes per second; `None` before a copy went right behind another.
    rate: Option<f64>,
    /// When the last copy was seen to have arrived.
    last: Option<Instant>,
}

impl Pace {
    /// Notes that a copy of `bytes` bytes, queued at `submitted`, was seen to have arrived
    /// at `now`.
    pub(super) fn note(&mut self, bytes: u64, submitted: Instant, now: Instant) {
        let before = self.last.replace(now);
        let Some(begin) = before.filter(|last| *last > submitted) else {
            // it may have waited for something else
            return;
        };
        let seconds = now.duration_since(begin).as_secs_f64();
        // copies found together say nothing
        if seconds > 0.0 {
            let rate = bytes as f64 / seconds;
            let mean = self.rate.unwrap_or(rate);
            self.rate = Some(mean + (rate - mean) / COPIES);
        }
    }

    /// How long the next copy, of `bytes` bytes and queued at `submitted`, will probably
    /// take from now on; `None` when nothing is known.
    pub(super) fn left(&self, bytes: u64, submitted: Instant) -> Option<Duration> {
        let begin = self.last.map_or(submitted, |last| last.max(submitted));
        let whole = bytes as f64 / self.rate?;
        let whole = Duration::try_from_secs_f64(whole).unwrap_or(Duration::MAX);
        Some(whole.saturating_sub(begin.elapsed()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_said_before_two_copies_went_one_behind_the_other() {
        let mut pace = Pace::default();
        let begin = Instant::now();
        pace.note(1000, begin, begin + Duration::from_secs(9));
        assert_eq!(pace.left(1000, begin), None);
        // queued after the first had arrived: the link was idle
        let later = begin + Duration::from_secs(10);
        pace.note(1000, later, begin + Duration::from_secs(12));
        assert_eq!(pace.left(1000, begin), None);
    }

    #[test]
    fn the_time_left_follows_from_the_copies_before() {
        let mut pace = Pace::default();
        let begin = Instant::now() + Duration::from_secs(1000);
        for second in 1..20 {
            pace.note(1 << 20, begin, begin + Duration::from_secs(second));
        }
        // the last one arrives in the future: nothing of the next has passed
        let left = pace.left(1 << 21, begin).unwrap();
        assert!(left.abs_diff(Duration::from_secs(2)) < Duration::from_millis(1));
    }
}

//! Who was placed where in the ring last.

/// Most places that are looked at: a ring of very many small parts has no bad ones.
const LOOKS: usize = 16;
/// How many uses lie between a part and who had its place before, for its copy to wait for
/// nobody: more is not better.
const ENOUGH: usize = 4;

/// A run of the ring, and which use was placed there last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    begin: u64,
    end: u64,
    last: usize,
}

/// The ring from 0 to its capacity, without gaps.
#[derive(Debug)]
pub(crate) struct Skyline {
    runs: Vec<Run>,
    capacity: u64,
    cursor: u64,
}

impl Skyline {
    /// A ring that nobody was placed in.
    pub(crate) fn new(capacity: u64) -> Self {
        Self {
            runs: vec![Run {
                begin: 0,
                end: capacity,
                last: 0,
            }],
            capacity,
            cursor: 0,
        }
    }

    /// A start for the `bytes` bytes of use `number`, which fit, with the use of `next`
    /// bytes to follow: a copy is to wait for nobody who was just served, neither this one
    /// nor the next. Of equals the one behind what was placed last.
    pub(crate) fn apart(&self, number: usize, bytes: u64, next: u64) -> u64 {
        let served = |start: u64| {
            let own = number - self.youngest(start, start + bytes, None);
            let placed = (start, start + bytes, number);
            let after = self
                .starts(next)
                .map(|start| number + 1 - self.youngest(start, start + next, Some(placed)))
                .max();
            own.min(after.unwrap_or(ENOUGH)).min(ENOUGH)
        };
        let mut best = None;
        for start in self.starts(bytes) {
            let served = served(start);
            if best.is_none_or(|(most, _)| served > most) {
                best = Some((served, start));
            }
            if served == ENOUGH {
                break;
            }
        }
        best.map_or(0, |(_, start)| start)
    }

    /// Places for `bytes` bytes: where runs begin, from behind what was placed last on, and
    /// both ends of the ring.
    fn starts(&self, bytes: u64) -> impl Iterator<Item = u64> {
        let behind = self.runs.partition_point(|run| run.begin < self.cursor);
        let starts = self.runs[behind..].iter().chain(&self.runs[..behind]);
        let starts = starts.map(|run| run.begin).take(LOOKS);
        let ends = [self.capacity.checked_sub(bytes), Some(0)];
        starts
            .chain(ends.into_iter().flatten())
            .filter(move |start| start + bytes <= self.capacity)
    }

    /// Notes that use `number`, counted from 1, was placed there.
    pub(crate) fn place(&mut self, begin: u64, end: u64, number: usize) {
        self.cursor = end;
        if begin == end {
            return;
        }
        let first = self.runs.partition_point(|run| run.end <= begin);
        let behind = self.runs.partition_point(|run| run.begin < end);
        let last = number;
        // the usual case: the same run again
        if let [run] = &mut self.runs[first..behind]
            && (run.begin, run.end) == (begin, end)
        {
            run.last = last;
            return;
        }
        let mut between = Vec::with_capacity(3);
        if let Some(cut) = self.runs.get(first).filter(|run| run.begin < begin) {
            between.push(Run { end: begin, ..*cut });
        }
        between.push(Run { begin, end, last });
        let cut = behind.checked_sub(1).and_then(|at| self.runs.get(at));
        if let Some(cut) = cut.filter(|run| run.end > end) {
            between.push(Run { begin: end, ..*cut });
        }
        self.runs.splice(first..behind, between);
    }

    /// The youngest use that was placed last anywhere between.
    pub(crate) fn last_between(&self, begin: u64, end: u64) -> usize {
        self.youngest(begin, end, None)
    }

    /// The youngest use that was placed last anywhere between; `placed` counts as placed.
    fn youngest(&self, begin: u64, end: u64, placed: Option<(u64, u64, usize)>) -> usize {
        if let Some((_, _, number)) = placed.filter(|(from, to, _)| begin < *to && *from < end) {
            return number;
        }
        let first = self.runs.partition_point(|run| run.end <= begin);
        let between = self.runs[first..].iter().take_while(|run| run.begin < end);
        between.map(|run| run.last).max().unwrap_or(0)
    }
}
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_matrices_of_a_decoder_never_follow_one_another_in_one_place() {
        // q, k, v, o, gate, up, down in MiB, in a ring of two of the largest
        let layer = [32, 8, 8, 32, 112, 112, 112];
        let mut skyline = Skyline::new(224);
        let uses: Vec<u64> = layer.into_iter().cycle().take(70).collect();
        let mut before = (0, 0);
        for (number, pair) in (1..).zip(uses.windows(2)) {
            let begin = skyline.apart(number, pair[0], pair[1]);
            let end = begin + pair[0];
            assert!(end <= 224);
            assert!(begin >= before.1 || end <= before.0, "{number}: {begin}");
            skyline.place(begin, end, number);
            before = (begin, end);
        }
    }

    #[test]
    fn equal_parts_go_round() {
        let mut skyline = Skyline::new(300);
        let starts: Vec<u64> = (1..=7)
            .map(|number| {
                let begin = skyline.apart(number, 100, 100);
                skyline.place(begin, begin + 100, number);
                begin
            })
            .collect();
        assert_eq!(starts, [0, 100, 200, 0, 100, 200, 0]);
    }

    #[test]
    fn a_run_in_the_middle_leaves_both_its_neighbours() {
        let mut skyline = Skyline::new(100);
        skyline.place(0, 100, 1);
        skyline.place(40, 60, 2);
        assert_eq!(skyline.youngest(0, 40, None), 1);
        assert_eq!(skyline.youngest(0, 41, None), 2);
        assert_eq!(skyline.youngest(60, 100, None), 1);
        assert_eq!(skyline.youngest(60, 100, Some((90, 95, 9))), 9);
        skyline.place(0, 100, 3);
        assert_eq!(skyline.runs.len(), 1);
    }
}

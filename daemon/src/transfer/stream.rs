//! One manager's ring as its engine sees it: what to copy next, and what may be
//! revoked.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use flextensord_device::{
    control::ControlPage,
    device::{DeviceError, Memory, Publish, Source, Ticket},
    doorbell::Doorbell,
    failpoint::{self, Point},
    handover::{Cells as _, Filler, Sight},
    journal::JournalFile,
    mapping::Mapping,
};
use flextensord_proto::{layout::State, limit};
use tokio::sync::Notify;

use super::{
    counters::Counters,
    occupancy::{inherited, overlapping},
};

/// Most bytes of one copy: larger parts go in pieces.
pub const PIECE_BYTES: u64 = 32 << 20;
/// Most bytes that small neighbours are copied in at once: a link is slow at less (an
/// H200's runs at 35 GB/s with 256 KiB, 48 with 1 MiB, 55 from 16 MiB on), and the first
/// of them waits for the last.
const RUN_BYTES: u64 = 4 << 20;
/// How long nothing is looked at closely while no word changes.
const LOOK: Duration = Duration::from_millis(250);
/// Bytes with which a released range is overwritten when that is asked for.
pub const POISON: u8 = 0xdb;

/// Where a streamed part comes from and goes to.
#[derive(Debug, Clone, Copy)]
pub struct StreamPart {
    /// Offset in the segment, in bytes.
    pub segment_offset: u64,
    /// Offset in the ring, in bytes.
    pub ring_offset: u64,
    /// Bytes to copy; 0 for a part that does not stream.
    pub bytes: u64,
}

/// Everything an engine needs to fill a manager's ring.
#[derive(Debug)]
pub struct StreamSpec {
    /// The manager.
    pub manager: u64,
    /// Its share of the link in proportion to others.
    pub weight: u32,
    /// Slot words and `want`.
    pub control: Arc<ControlPage>,
    /// What was issued.
    pub journal: JournalFile,
    /// The ring.
    pub ring: Arc<dyn Memory>,
    /// The weight set's segment.
    pub segment: Arc<Mapping>,
    /// All parts of the plan, by index.
    pub parts: Vec<StreamPart>,
    /// Streamed parts in the order of a pass.
    pub order: Vec<u32>,
    /// What the manager's client rings.
    pub doorbell: Arc<Doorbell>,
    /// What was moved.
    pub counters: Arc<Counters>,
    /// Told when the part that an RPC waits for is full.
    pub arrived: Arc<Notify>,
    /// Whether an RPC waits.
    pub rpc_waits: Arc<AtomicBool>,
    /// Overwrite ranges that were given back, to prove that nobody reads them.
    pub poison: bool,
}

/// Parts whose copy was issued and not yet submitted whole: one, or neighbours in
/// segment and ring that go together.
#[derive(Debug, Clone)]
struct Pending {
    parts: Vec<(u32, u32)>,
    bytes: u64,
    done: u64,
}

/// What there was when there was nothing to do.
#[derive(Debug, Clone, Copy)]
struct Rest {
    fingerprint: u64,
    since: Instant,
}

/// A manager's ring under work.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) spec: StreamShared,
    filler: Filler<JournalFile>,
    /// Where each part stands in the order.
    positions: Vec<Vec<usize>>,
    /// Next position to fill.
    cursor: usize,
    /// Last position that the client was seen to take.
    reached: usize,
    /// Positions filled ahead of the client, and how often each part is among them.
    window: VecDeque<usize>,
    ahead: Vec<u32>,
    /// Parts that are not known to be empty, by their offset in the ring. They never
    /// overlap, and no client can change this.
    occupied: BTreeMap<u64, u32>,
    pending: Option<Pending>,
    rest: Option<Rest>,
    last: Ticket,
    foreign: Vec<bool>,
}

/// The spec without its journal, which the filler owns.
#[derive(Debug)]
pub(super) struct StreamShared {
    pub(super) manager: u64,
    pub(super) weight: u32,
    pub(super) control: Arc<ControlPage>,
    pub(super) ring: Arc<dyn Memory>,
    segment: Arc<Mapping>,
    parts: Vec<StreamPart>,
    order: Vec<u32>,
    pub(super) doorbell: Arc<Doorbell>,
    pub(super) counters: Arc<Counters>,
    pub(super) arrived: Arc<Notify>,
    pub(super) rpc_waits: Arc<AtomicBool>,
    poison: bool,
}

impl Stream {
    pub(super) fn new(spec: StreamSpec) -> Self {
        let mut positions = vec![Vec::new(); spec.parts.len()];
        for (position, part) in spec.order.iter().enumerate() {
            positions[*part as usize].push(position);
        }
        let (parts, order) = (spec.parts.len(), spec.order.len().max(1));
        let mut filler = Filler::new(spec.journal);
        let (occupied, reached) =
            inherited(&mut filler, spec.control.as_ref(), &spec.parts, &spec.order);
        Self {
            filler,
            spec: StreamShared {
                manager: spec.manager,
                weight: spec.weight,
                control: spec.control,
                ring: spec.ring,
                segment: spec.segment,
                parts: spec.parts,
                order: spec.order,
                doorbell: spec.doorbell,
                counters: spec.counters,
                arrived: spec.arrived,
                rpc_waits: spec.rpc_waits,
                poison: spec.poison,
            },
            positions,
            cursor: reached.map_or(0, |position| (position + 1) % order),
            reached: reached.unwrap_or(0),
            window: VecDeque::new(),
            ahead: vec![0; parts],
            occupied,
            pending: None,
            rest: None,
            last: Ticket::default(),
            foreign: vec![false; parts],
        }
    }

    /// The last copy that was submitted for this ring.
    pub(super) fn last(&self) -> Ticket {
        self.last
    }

    /// Ends the work; the journal goes back to the manager.
    pub(super) fn into_journal(self) -> JournalFile {
        self.filler.into_journal()
    }

    /// Wakes an RPC that waits for a part which has arrived.
    pub(super) fn tell_rpc(&self) {
        if self.spec.rpc_waits.load(SeqCst) {
            let want = self.spec.control.want();
            if self.spec.control.load(want).state() == Some(State::Full) {
                self.spec.arrived.notify_one();
            }
        }
    }

    /// Submits the next piece if there is one to submit. Returns its bytes.
    pub(super) fn step(&mut self) -> Result<Option<u64>, DeviceError> {
        if self.pending.is_none() {
            // read before the words are: what changes from here on is seen next time
            let fingerprint = self.spec.control.fingerprint();
            if self.rests(fingerprint) {
                return Ok(None);
            }
            self.spec.counters.note_want(self.spec.control.want());
            self.observe();
            if self.spec.poison {
                self.poison_released();
            }
            self.pending = self.choose();
            self.rest = self.pending.is_none().then(|| Rest {
                fingerprint,
                since: Instant::now(),
            });
        }
        match self.pending.take() {
            Some(pending) => self.submit(pending).map(Some),
            None => Ok(None),
        }
    }

    /// Whether there was nothing to do, and nothing has changed since.
    fn rests(&self, fingerprint: u64) -> bool {
        self.rest
            .is_some_and(|rest| rest.fingerprint == fingerprint && rest.since.elapsed() < LOOK)
    }

    fn submit(&mut self, mut pending: Pending) -> Result<u64, DeviceError> {
        let place = self.spec.parts[pending.parts[0].0 as usize];
        let bytes = (pending.bytes - pending.done).min(PIECE_BYTES);
        let whole = pending.done + bytes == pending.bytes;
        let own: u64 = pending
            .parts
            .iter()
            .map(|(part, _)| self.spec.parts[*part as usize].bytes)
            .sum();
        // several parts go in one copy
        let gaps = pending.bytes - own;
        let source = Source {
            segment: Arc::clone(&self.spec.segment),
            offset: place.segment_offset + pending.done,
            bytes,
        };
        let publish = |(part, sequence): &(u32, u32)| Publish {
            control: Arc::clone(&self.spec.control),
            part: *part,
            sequence: *sequence,
        };
        let publishes: Vec<Publish> = match whole {
            true => pending.parts.iter().map(publish).collect(),
            false => Vec::new(),
        };
        let ring = &self.spec.ring;
        let submitted = failpoint::pass(Point::Submit)
            .map_err(DeviceError::from)
            .and_then(|()| ring.fill(place.ring_offset + pending.done, source, &publishes));
        failpoint::cross(Point::Submitted);
        match submitted {
            Ok(ticket) => self.last = ticket,
            Err(error) => {
                // pieces that were taken may still arrive; what is queued behind them in
                // their place arrives later
                for (part, _) in &pending.parts {
                    self.filler.withdraw(*part);
                }
                return Err(error);
            }
        }
        tracing::trace!(
            manager = self.spec.manager,
            part = pending.parts[0].0,
            parts = pending.parts.len(),
            from = pending.done,
            bytes,
            "copy queued"
        );
        if whole {
            let parts = pending.parts.len() as u64;
            self.spec.counters.count(|c| &c.parts_filled, parts);
        } else {
            pending.done += bytes;
            self.pending = Some(pending);
        }
        // what lies between neighbours is nobody's
        self.spec
            .counters
            .count(|c| &c.streamed_bytes, bytes - gaps);
        Ok(bytes)
    }

    /// Moves the window on to where the client was last seen: a part filled ahead that
    /// is in use or empty again was taken, and what lies before it was taken or skipped.
    fn observe(&mut self) {
        let taken = |position: &usize| {
            let part = self.spec.order[*position];
            let sight = self.filler.sight(self.spec.control.as_ref(), part);
            matches!(sight, Sight::InUse | Sight::Empty)
        };
        if let Some(index) = self.window.iter().rposition(taken) {
            for position in self.window.drain(..=index) {
                self.ahead[self.spec.order[position] as usize] -= 1;
                self.reached = position;
            }
        }
    }

    /// The part to fill now: the one that the client waits for, else the next one.
    fn choose(&mut self) -> Option<Pending> {
        if let Some(part) = self.answer_want() {
            return part;
        }
        // a whole pass may lie ahead; then there is nothing left to do
        for _ in 0..self.spec.order.len() {
            if self.window.len() >= self.spec.order.len() {
                return None;
            }
            let part = *self.spec.order.get(self.cursor)?;
            match self.filler.sight(self.spec.control.as_ref(), part) {
                Sight::Empty if self.is_clear(part) => {
                    let position = self.cursor;
                    let mut pending = self.issue(part, position);
                    self.extend(&mut pending);
                    return Some(pending);
                }
                // skipped earlier, or on its way: it serves this position as well
                Sight::Full | Sight::Filling if self.ahead[part as usize] == 0 => {
                    self.advance(part, self.cursor);
                }
                Sight::Foreign => {
                    self.note_foreign(part);
                    self.cursor = (self.cursor + 1) % self.spec.order.len();
                }
                _ => return None,
            }
        }
        None
    }

    /// Serves a client that waits for an empty part: full parts in its place are
    /// revoked. `Some(None)` means that it cannot be filled yet, and nothing that
    /// overlaps it may be issued before it.
    fn answer_want(&mut self) -> Option<Option<Pending>> {
        let frozen = self.filler.frozen(self.spec.control.as_ref())?;
        let part = frozen.part();
        let place = *self
            .spec
            .parts
            .get(part as usize)
            .filter(|place| place.bytes > 0)?;
        let mut revoked = Vec::new();
        for &other in overlapping(&self.occupied, &self.spec.parts, place) {
            if other != part && frozen.revoke(other) {
                revoked.push(other);
            }
        }
        self.spec
            .counters
            .count(|c| &c.parts_revoked, revoked.len() as u64);
        // revoked, not taken: they tell nothing of where the client is
        self.window.retain(|position| {
            let part = self.spec.order[*position];
            let stays = !revoked.contains(&part);
            self.ahead[part as usize] -= u32::from(!stays);
            stays
        });
        if !self.is_clear(part) {
            return Some(None);
        }
        let position = self.next_position(part)?;
        if position != self.cursor {
            self.spec.counters.count(|c| &c.parts_out_of_order, 1);
        }
        // what was filled ahead was skipped: it counts again when the cursor meets it
        for position in self.window.drain(..) {
            self.ahead[self.spec.order[position] as usize] -= 1;
        }
        self.reached = position;
        Some(Some(self.issue(part, position)))
    }

    /// The next position of `part` in the order, from where the client was last seen.
    fn next_position(&self, part: u32) -> Option<usize> {
        let positions = self.positions.get(part as usize)?;
        let at = positions.partition_point(|position| *position <= self.reached);
        positions.get(at).or_else(|| positions.first()).copied()
    }

    fn issue(&mut self, part: u32, position: usize) -> Pending {
        failpoint::cross(Point::Issue);
        let sequence = self.filler.issue(part);
        self.occupied
            .insert(self.spec.parts[part as usize].ring_offset, part);
        self.advance(part, position);
        Pending {
            parts: vec![(part, sequence)],
            bytes: self.spec.parts[part as usize].bytes,
            done: 0,
        }
    }

    /// Adds the parts that come next in the order, as long as they lie behind in segment
    /// and ring as they do and may be filled now.
    fn extend(&mut self, pending: &mut Pending) {
        let first = self.spec.parts[pending.parts[0].0 as usize];
        while self.window.len() < self.spec.order.len() {
            let part = self.spec.order[self.cursor];
            let place = self.spec.parts[part as usize];
            let Some(span) = limit::align(pending.bytes) else {
                return;
            };
            let adjacent = place.segment_offset == first.segment_offset + span
                && place.ring_offset == first.ring_offset + span;
            if !adjacent
                || span + place.bytes > RUN_BYTES
                || self.filler.sight(self.spec.control.as_ref(), part) != Sight::Empty
                || !self.is_clear(part)
            {
                return;
            }
            let next = self.issue(part, self.cursor);
            pending.parts.extend(next.parts);
            pending.bytes = span + place.bytes;
        }
    }

    fn advance(&mut self, part: u32, position: usize) {
        self.window.push_back(position);
        self.ahead[part as usize] += 1;
        self.cursor = (position + 1) % self.spec.order.len();
    }

    /// Whether everything that overlaps `part` is empty; forgets what was seen empty.
    fn is_clear(&mut self, part: u32) -> bool {
        let place = self.spec.parts[part as usize];
        let others: Vec<u32> = overlapping(&self.occupied, &self.spec.parts, place)
            .copied()
            .collect();
        others.into_iter().all(|other| {
            let sight = self.filler.sight(self.spec.control.as_ref(), other);
            if sight == Sight::Foreign {
                self.note_foreign(other);
            }
            let empty = sight == Sight::Empty;
            if empty {
                self.forget(other);
            }
            empty
        })
    }

    fn forget(&mut self, part: u32) {
        let place = self.spec.parts[part as usize];
        self.occupied.remove(&place.ring_offset);
        if self.spec.poison {
            // the range was checked when the plan was made
            let _: Result<(), DeviceError> =
                self.spec
                    .ring
                    .poison(place.ring_offset, place.bytes, POISON);
        }
    }

    fn poison_released(&mut self) {
        let empty: Vec<u32> = self
            .occupied
            .values()
            .copied()
            .filter(|part| self.filler.sight(self.spec.control.as_ref(), *part) == Sight::Empty)
            .collect();
        empty.into_iter().for_each(|part| self.forget(part));
    }

    fn note_foreign(&mut self, part: u32) {
        if !std::mem::replace(&mut self.foreign[part as usize], true) {
            self.spec.counters.count(|c| &c.protocol_violations, 1);
        }
    }
}

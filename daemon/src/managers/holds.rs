//! Holds over RPC: for every client, about a hundred microseconds each. The fast path
//! changes the same slot words without asking; its holds are counted by the client.

use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering::SeqCst},
    time::Duration,
};

use flextensord_device::{
    control::ControlPage,
    doorbell::Doorbell,
    failpoint::{self, Point},
    handover::{Cells as _, end_wait, give_back, take},
};
use flextensord_proto::layout::State;
use tokio::time::{Instant, timeout, timeout_at};

use super::{
    error::ManagerError,
    manager::Manager,
    model::{Layer, Model},
};

/// Longest sleep between two looks at a slot word: a guard against a lost wake-up.
const LOOK: Duration = Duration::from_millis(20);

/// Most holds of a manager, and most streamed parts of them: as many as four of the
/// largest layers.
const HOLDS: usize = 1 << 16;
const HELD_PARTS: usize = 1 << 22;

/// The holds of one manager.
#[derive(Debug, Default)]
pub struct Holds {
    held: HashMap<u64, Vec<u32>>,
    counts: HashMap<u32, u32>,
    /// Parts of all holds, each as often as it is held.
    parts: usize,
    next: u64,
}

impl Holds {
    /// Takes over holds of a dead daemon: the words of their parts are in use.
    ///
    /// # Errors
    /// When they are more than a manager may have, or of parts that do not stream.
    pub(super) fn restore(
        &mut self,
        manager: &str,
        model: &Model,
        holds: Vec<(u64, Vec<u32>)>,
    ) -> Result<(), ManagerError> {
        for (hold, parts) in holds {
            self.check_room(manager, parts.len())?;
            let stranger = parts.iter().find(|part| !model.streams(**part));
            if let Some(part) = stranger.or((hold == 0).then_some(&0)) {
                return Err(ManagerError::Field {
                    field: "holds.parts",
                    value: format!("{part} in hold {hold}"),
                    rule: "streamed parts of the plan, in a hold that Acquire named".to_owned(),
                });
            }
            for part in &parts {
                *self.counts.entry(*part).or_default() += 1;
            }
            self.parts += parts.len();
            // numbers grow, in their high half
            self.next = self.next.max(hold >> 32);
            self.held.insert(hold, parts);
        }
        Ok(())
    }

    /// Number of holds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Whether there is room for one more hold of so many parts.
    fn check_room(&self, manager: &str, parts: usize) -> Result<(), ManagerError> {
        let held = self.parts.saturating_add(parts);
        for (is_over, what, limit) in [
            (self.held.len() >= HOLDS, "holds", HOLDS),
            (held > HELD_PARTS, "streamed parts in its holds", HELD_PARTS),
        ] {
            if is_over {
                let manager = manager.to_owned();
                return Err(ManagerError::TooManyHolds {
                    manager,
                    what,
                    limit,
                });
            }
        }
        Ok(())
    }

    fn add(&mut self, parts: Vec<u32>) -> Result<u64, ManagerError> {
        let mut random = [0; 4];
        getrandom::fill(&mut random).map_err(|_| ManagerError::Random)?;
        // never repeats, and cannot be guessed from another
        self.next += 1;
        let hold = self.next << 32 | u64::from(u32::from_le_bytes(random));
        for part in &parts {
            *self.counts.entry(*part).or_default() += 1;
        }
        self.parts += parts.len();
        self.held.insert(hold, parts);
        Ok(hold)
    }
}

/// Waits until all parts of a layer are there and holds them: all or nothing. Dropped
/// before it is done, it leaves nothing held. Returns the hold.
///
/// # Errors
/// When the layer is unknown, a part would overlap a held one, the time is over, or
/// the lease ends.
pub async fn acquire(
    manager: &Manager,
    layer: &str,
    except: &[u32],
    limit: Duration,
) -> Result<(u64, Arc<Model>), ManagerError> {
    failpoint::pass(Point::Acquire)?;
    let model = manager.model()?;
    let layer = model.layer(&manager.name, layer)?;
    if let Some(stranger) = except.iter().find(|part| !layer.parts.contains(part)) {
        return Err(ManagerError::Field {
            field: "except_parts",
            value: stranger.to_string(),
            rule: format!("must be parts of layer {:?}", layer.name),
        });
    }
    let begin = Instant::now();
    let deadline = begin + limit;
    let late = |part: u32| ManagerError::Deadline {
        layer: layer.name.clone(),
        part,
        waited_ms: u64::try_from(begin.elapsed().as_millis()).unwrap_or(u64::MAX),
    };
    let first = layer.parts.first().copied().unwrap_or(0);
    let mut holds = timeout(limit, manager.holds.lock())
        .await
        .map_err(|_| late(first))?;
    let streamed: Vec<u32> = layer
        .parts
        .iter()
        .copied()
        .filter(|part| model.streams(*part) && !except.contains(part))
        .collect();
    holds.check_room(&manager.name, streamed.len())?;
    let mut taking = Taking::new(manager, &model);
    for &part in &streamed {
        if holds.counts.contains_key(&part) {
            continue;
        }
        if !take(model.control.as_ref(), part) {
            refuse_conflict(&model, layer, part)?;
            taking
                .wait(part, deadline)
                .await
                .map_err(|why| why.unwrap_or_else(|| late(part)))?;
        }
        taking.parts.push(part);
    }
    if manager.ended.is_cancelled() {
        return Err(ManagerError::LeaseLost);
    }
    let hold = holds.add(streamed)?;
    taking.parts.clear();
    drop(taking);
    drop(holds);
    failpoint::cross(Point::Acquired);
    Ok((hold, model))
}

/// Gives back what an acquire of a dead daemon took whose answer its caller never saw:
/// those of `parts` that are in use and in no hold.
///
/// # Errors
/// When no model is registered.
pub async fn give_up(manager: &Manager, parts: &[u32]) -> Result<(), ManagerError> {
    let model = manager.model()?;
    let holds = manager.holds.lock().await;
    for part in parts.iter().filter(|part| !holds.counts.contains_key(part)) {
        give_back(model.control.as_ref(), *part);
    }
    manager.doorbell.ring();
    Ok(())
}

/// Checks that a hold is one of the manager's.
///
/// # Errors
/// When it is unknown, or was given back.
pub async fn check(manager: &Manager, hold: u64) -> Result<(), ManagerError> {
    match manager.holds.lock().await.held.contains_key(&hold) {
        true => Ok(()),
        false => Err(ManagerError::UnknownHold { hold }),
    }
}

/// Gives a hold back: all reads of its bytes have completed. Parts in `keep` stay in use
/// for the fast path.
///
/// # Errors
/// When the hold is unknown, or `keep` names a part that is not in it.
pub async fn release(manager: &Manager, hold: u64, keep: &[u32]) -> Result<(), ManagerError> {
    failpoint::pass(Point::Release)?;
    let model = manager.model()?;
    let mut holds = manager.holds.lock().await;
    let parts = holds
        .held
        .get(&hold)
        .ok_or(ManagerError::UnknownHold { hold })?;
    if let Some(stranger) = keep.iter().find(|part| !parts.contains(part)) {
        return Err(ManagerError::Field {
            field: "keep_parts",
            value: stranger.to_string(),
            rule: format!("must be streamed parts of hold {hold}"),
        });
    }
    let parts = holds.held.remove(&hold).unwrap_or_default();
    holds.parts = holds.parts.saturating_sub(parts.len());
    for part in parts {
        let last = match holds.counts.get_mut(&part) {
            Some(count) if *count > 1 => {
                *count -= 1;
                false
            }
            _ => {
                holds.counts.remove(&part);
                true
            }
        };
        if last && !keep.contains(&part) {
            give_back(model.control.as_ref(), part);
        }
    }
    manager.doorbell.ring();
    failpoint::cross(Point::Released);
    Ok(())
}

/// Refuses a part that cannot come because the client itself holds its place.
fn refuse_conflict(model: &Model, layer: &Layer, part: u32) -> Result<(), ManagerError> {
    let in_use = |part: u32| model.control.load(part).state() == Some(State::InUse);
    if in_use(part) {
        return Err(ManagerError::HeldByFastPath {
            layer: layer.name.clone(),
            part,
        });
    }
    let parts = u32::try_from(model.structure.parts.len()).unwrap_or(u32::MAX);
    let held = (0..parts).find(|other| model.overlap(part, *other) && in_use(*other));
    match held {
        Some(held) => Err(ManagerError::HoldConflict {
            layer: layer.name.clone(),
            part,
            held,
        }),
        None => Ok(()),
    }
}

/// Parts taken for a hold that is not complete: dropped, they are given back.
struct Taking<'a> {
    manager: &'a Manager,
    control: Arc<ControlPage>,
    doorbell: Arc<Doorbell>,
    parts: Vec<u32>,
    waits: bool,
}

impl<'a> Taking<'a> {
    fn new(manager: &'a Manager, model: &Model) -> Self {
        Self {
            manager,
            control: Arc::clone(&model.control),
            doorbell: Arc::clone(&manager.doorbell),
            parts: Vec::new(),
            waits: false,
        }
    }

    /// Waits for a part as the client would. `Err(None)` when the deadline is over.
    async fn wait(&mut self, part: u32, deadline: Instant) -> Result<(), Option<ManagerError>> {
        self.waits = true;
        self.control.set_want(part);
        self.manager.rpc_waits.store(true, SeqCst);
        self.doorbell.ring();
        let taken = loop {
            if take(self.control.as_ref(), part) {
                break Ok(());
            }
            if Instant::now() >= deadline {
                break Err(None);
            }
            let look = deadline.min(Instant::now() + LOOK);
            tokio::select! {
                () = self.manager.ended.cancelled() => break Err(Some(ManagerError::LeaseLost)),
                _ = timeout_at(look, self.manager.arrived.notified()) => {}
            }
        };
        self.stop_waiting();
        taken
    }

    fn stop_waiting(&mut self) {
        if std::mem::take(&mut self.waits) {
            self.manager.rpc_waits.store(false, SeqCst);
            end_wait(self.control.as_ref());
        }
    }
}

impl Drop for Taking<'_> {
    fn drop(&mut self) {
        self.stop_waiting();
        for part in self.parts.drain(..) {
            give_back(self.control.as_ref(), part);
            self.doorbell.ring();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(refused: Result<(), ManagerError>) -> Option<usize> {
        match refused {
            Err(ManagerError::TooManyHolds { limit, .. }) => Some(limit),
            _ => None,
        }
    }

    #[test]
    fn a_manager_cannot_pile_up_holds_or_their_parts() {
        let mut holds = Holds::default();
        for _ in 0..HOLDS {
            holds.check_room("m", 0).unwrap();
            holds.add(Vec::new()).unwrap();
        }
        assert_eq!(limit(holds.check_room("m", 0)), Some(HOLDS));
        let mut holds = Holds::default();
        holds.check_room("m", HELD_PARTS).unwrap();
        holds.add(vec![0, 1, 2]).unwrap();
        assert_eq!(limit(holds.check_room("m", HELD_PARTS)), Some(HELD_PARTS));
        holds.check_room("m", HELD_PARTS - 3).unwrap();
    }
}

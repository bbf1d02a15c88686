//! Managers of a dead daemon: kept for their owners, who hand back what they hold.
//!
//! A record names every allocation of a manager, but only its client still holds their
//! descriptors. With them the successor has the ring, the residents, the page of slot
//! words and, from the state directory, the journal: the engine goes on where it was.

use std::{
    collections::{HashMap, HashSet},
    ops::RangeInclusive,
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use flextensord_device::{
    failpoint::{self, Point},
    process::{Peer, Process, start_time},
};
use flextensord_proto::{name, v1::lease_ended::Reason};
use tokio::{task::JoinHandle, time};

use super::{
    error::ManagerError,
    manager::{Manager, Token},
    rebuilding::model,
    record::{self, FORMAT, ManagerRecord, PlanRecord},
    registration,
    registry::Managers,
};
use crate::{
    transfer::{managed::ManagedDevice, memory::Reservation},
    weights::registry::Attachment,
};

/// How often managers that nobody has taken up are looked at.
const LOOK: Duration = Duration::from_millis(200);
/// Shares of the link that a manager may have.
const LINK_WEIGHTS: RangeInclusive<u32> = 1..=1000;

/// A manager without an owner that is known to this daemon.
#[derive(Debug)]
pub(super) struct Orphan {
    pub(super) record: ManagerRecord,
    device: Arc<ManagedDevice>,
    /// Keep its weight sets from being dropped.
    attachments: Vec<Attachment>,
    /// Keeps what its client still maps from being granted anew, where the device itself
    /// does not know of it.
    _reservation: Option<Reservation>,
    process: Option<Process>,
    deadline: Instant,
}

impl Orphan {
    fn is_dead(&self) -> bool {
        self.process.as_ref().is_some_and(Process::has_exited)
    }
}

/// What a client hands back of its manager.
#[derive(Debug, Default)]
pub struct HandedBack {
    /// The control page of each plan version.
    pub controls: HashMap<u64, OwnedFd>,
    /// Memory by the id of its allocation.
    pub memory: HashMap<u64, OwnedFd>,
    /// It has mapped nothing, and says so: a registration that its daemon may have finished
    /// is forgotten.
    pub is_nothing: bool,
    /// Holds over RPC: number and streamed parts.
    pub holds: Vec<(u64, Vec<u32>)>,
}

impl Managers {
    /// Whether a dead daemon left rings on devices of one of `kinds`, by its records.
    #[must_use]
    pub fn has_left_rings(&self, kinds: &[&str]) -> bool {
        let is_there = |uuid: &str| {
            let mut devices = self.devices().iter().map(|device| device.info());
            devices.any(|info| info.uuid == uuid && kinds.contains(&info.kind))
        };
        let files = self.state().list().unwrap_or_default();
        let records = files.iter().filter(|file| record::is_record(file));
        records
            .filter_map(|file| self.state().read::<ManagerRecord>(file).ok().flatten())
            .any(|record| is_there(&record.device) && !record.plans.is_empty())
    }

    /// Finds the managers that a dead daemon left; the records of those that cannot be taken
    /// up, because their owners or weight sets are gone, are removed. Before anything is
    /// served. Returns how many wait for their owners.
    ///
    /// # Errors
    /// When the state directory cannot be read.
    pub fn restore(&self, patience: Duration) -> Result<usize, ManagerError> {
        let mut kept = HashSet::new();
        let mut counted = HashSet::new();
        let files = self.state().list()?;
        for file in files.iter().filter(|file| record::is_record(file)) {
            match self.orphan(file, patience, &mut counted) {
                Ok(orphan) => {
                    tracing::info!(
                        manager = orphan.record.name,
                        uid = orphan.record.uid,
                        pid = orphan.record.pid,
                        lease_epoch = orphan.record.lease_epoch,
                        "manager waits for its owner"
                    );
                    kept.insert(file.clone());
                    kept.extend(orphan.record.plans.iter().map(|plan| plan.journal.clone()));
                    let digest = orphan.record.token_digest.clone();
                    self.names().orphans.insert(digest, orphan);
                }
                Err(why) => tracing::info!(file, why, "manager not taken over"),
            }
        }
        let of_manager = files.iter().filter(|file| record::is_of_manager(file));
        for file in of_manager.filter(|file| !kept.contains(*file)) {
            self.state().remove(file)?;
        }
        Ok(self.names().orphans.len())
    }

    fn orphan(
        &self,
        file: &str,
        patience: Duration,
        counted: &mut HashSet<u64>,
    ) -> Result<Orphan, String> {
        failpoint::pass(Point::AdoptManager).map_err(|e| e.to_string())?;
        let read = self.state().read(file).map_err(|e| e.to_string())?;
        let record: ManagerRecord = read.ok_or("its record is gone")?;
        if record.format != FORMAT {
            return Err(format!("format {} instead of {FORMAT}", record.format));
        }
        if record::name(record.id) != file {
            return Err("its record has another's name".to_owned());
        }
        name::check(&record.name).map_err(|error| format!("its name: {error}"))?;
        if !LINK_WEIGHTS.contains(&record.link_weight) {
            return Err(format!("its link weight is {}", record.link_weight));
        }
        let is_gone = record.pid != 0
            && (Process::is_gone(record.pid)
                || record.pid_started.is_some() && start_time(record.pid) != record.pid_started);
        if is_gone {
            return Err(format!("its owner, process {}, is gone", record.pid));
        }
        let uuid = &record.device;
        let device = self.devices().iter().find(|d| d.info().uuid == *uuid);
        let device = Arc::clone(device.ok_or_else(|| format!("there is no device {uuid}"))?);
        let attach = |plan: &PlanRecord| {
            self.weights()
                .attach_id(record.uid, &plan.weight_set, &record.name)
                .map_err(|_| format!("its weight set {} is gone", plan.weight_set))
        };
        let attachments = record.plans.iter().map(attach).collect::<Result<_, _>>()?;
        let reservation = match device.info().kind {
            // a GPU's driver counts what clients map
            "cuda" => None,
            _ => {
                let all = record.plans.iter().flat_map(PlanRecord::allocations);
                let new = all.filter(|memory| counted.insert(memory.id));
                let bytes = new.map(|memory| memory.bytes).sum();
                let reserved = device.memory.reserve(bytes);
                Some(reserved.map_err(|e| e.to_string())?)
            }
        };
        Ok(Orphan {
            process: Process::open(record.pid),
            device,
            attachments,
            _reservation: reservation,
            deadline: Instant::now() + patience,
            record,
        })
    }

    /// Whether a token is that of a manager which waits for its owner.
    #[must_use]
    pub fn is_orphan(&self, token: &[u8]) -> bool {
        let digest = record::token_digest(token);
        self.names().orphans.contains_key(&digest)
    }

    /// Takes a manager up again for its owner, with what that hands back. Blocks the thread.
    ///
    /// # Errors
    /// [`ManagerError::LeaseLost`] when the token is none of this user's, and
    /// [`ManagerError::NotAdopted`] when what is handed back is not what the record says: the
    /// manager is over then.
    pub fn adopt(
        &self,
        peer: Peer,
        token: &[u8],
        open_id: &str,
        client: &str,
        handed: HandedBack,
    ) -> Result<Arc<Manager>, ManagerError> {
        let secret: Token = token.try_into().map_err(|_| ManagerError::LeaseLost)?;
        let digest = record::token_digest(token);
        let mut names = self.names();
        match names.orphans.get(&digest) {
            Some(orphan) if orphan.record.uid == peer.uid => {
                // it did not know yet that it speaks to a successor
                let has_plans = !orphan.record.plans.is_empty();
                if has_plans && handed.controls.is_empty() && !handed.is_nothing {
                    return Err(ManagerError::Recovering);
                }
            }
            _ => return Err(ManagerError::LeaseLost),
        }
        let Some(orphan) = names.orphans.remove(&digest) else {
            return Err(ManagerError::LeaseLost);
        };
        // its name stays taken until it is a manager again or over
        let key = (peer.uid, orphan.record.name.clone());
        names.adopting.insert(digest.clone(), key.clone());
        drop(names);
        let record = orphan.record.clone();
        let adopted = self.rebuild(peer, secret, open_id, client, orphan, handed);
        let mut names = self.names();
        names.adopting.remove(&digest);
        match adopted {
            Ok(manager) => {
                if manager.model_slot().is_none() {
                    self.forget_journals(&record);
                }
                names.by_name.insert(key, Arc::clone(&manager));
                names.by_token.insert(secret, Arc::clone(&manager));
                drop(names);
                self.watch(&manager);
                tracing::info!(
                    manager = manager.name,
                    uid = peer.uid,
                    pid = peer.pid,
                    lease_epoch = manager.lease_epoch,
                    "manager taken up by its owner"
                );
                Ok(manager)
            }
            Err(error) => {
                drop(names);
                self.forget(&record, &error.to_string());
                Err(error)
            }
        }
    }

    fn rebuild(
        &self,
        peer: Peer,
        token: Token,
        open_id: &str,
        client: &str,
        orphan: Orphan,
        mut handed: HandedBack,
    ) -> Result<Arc<Manager>, ManagerError> {
        let Orphan {
            record,
            device,
            attachments,
            _reservation: reservation,
            ..
        } = orphan;
        // what it kept is about to be counted by the device itself
        drop(reservation);
        let mut manager = self.bare(peer, open_id, client, record.name.clone(), &device)?;
        manager.id = record.id;
        manager.lease_epoch = record.lease_epoch;
        manager.since_ms = record.since_ms;
        manager.link_weight = record.link_weight;
        manager.token = token;
        manager.is_adopted = true;
        let manager = Arc::new(manager);
        let record = ManagerRecord {
            // the owner may be another process by now
            pid: peer.pid,
            pid_started: manager.owner_started,
            // what it has not mapped was never complete
            plans: match handed.is_nothing {
                true => Vec::new(),
                false => record.plans,
            },
            ..record
        };
        // before anything is set to work: what fails here leaves nothing behind
        self.state().write(&record::name(record.id), &record)?;
        let refused = |why: String| ManagerError::NotAdopted {
            name: record.name.clone(),
            why,
        };
        // of several versions only the last is in force; there is no other yet
        if let Some((plan, attachment)) = record.plans.iter().zip(attachments).next_back() {
            let (model, journal) =
                model(&manager, plan, attachment, &mut handed, self).map_err(refused)?;
            failpoint::pass(Point::AdoptRing)?;
            let mut holds = manager.holds.blocking_lock();
            holds
                .restore(&manager.name, &model, handed.holds)
                .map_err(|error| refused(error.to_string()))?;
            drop(holds);
            registration::install(self, &manager, &Arc::new(model), journal)?;
        }
        failpoint::cross(Point::AdoptedRing);
        Ok(manager)
    }

    /// Removes what is left of a manager that nobody can take up any more.
    fn forget(&self, record: &ManagerRecord, why: &str) {
        tracing::info!(
            manager = record.name,
            uid = record.uid,
            why,
            "manager not taken up"
        );
        self.forget_journals(record);
        self.forget_file(&record::name(record.id));
    }

    fn forget_journals(&self, record: &ManagerRecord) {
        for plan in &record.plans {
            self.forget_file(&plan.journal);
        }
    }

    fn forget_file(&self, file: &str) {
        if let Err(error) = self.state().remove(file) {
            tracing::warn!(file, %error, "state of a manager left behind");
        }
    }

    /// Gives up all managers that wait for their owners: there is to be no successor.
    pub(super) fn give_up_all(&self) {
        for orphan in self.give_up(|_| true) {
            self.forget(&orphan.record, "the daemon stops for good");
        }
    }

    /// Gives up the manager of that name if it waits for its owner. Whether it did.
    pub fn terminate_waiting(&self, uid: u32, name: &str) -> Option<u64> {
        let named = |orphan: &Orphan| orphan.record.uid == uid && orphan.record.name == name;
        let given_up = self.give_up(named).pop()?;
        self.forget(&given_up.record, "an operator terminated it");
        let plans = given_up.record.plans.iter();
        Some(plans.map(|plan| plan.plan.held_bytes()).sum())
    }

    /// Managers that wait for their owners, in order of user and name.
    #[must_use]
    pub fn waiting(&self) -> Vec<ManagerRecord> {
        let names = self.names();
        let mut waiting: Vec<_> = names
            .orphans
            .values()
            .map(|orphan| orphan.record.clone())
            .collect();
        drop(names);
        waiting.sort_by(|a, b| (a.uid, &a.name).cmp(&(b.uid, &b.name)));
        waiting
    }

    /// Gives managers up whose owner is dead or late. Runs until cancelled.
    pub async fn wait_for_owners(&self) {
        loop {
            let given_up =
                self.give_up(|orphan| orphan.is_dead() || Instant::now() >= orphan.deadline);
            for orphan in given_up {
                let why = if orphan.is_dead() {
                    "its owner is dead"
                } else {
                    "its owner is late"
                };
                self.forget(&orphan.record, why);
            }
            if self.names().orphans.is_empty() {
                return std::future::pending().await;
            }
            time::sleep(LOOK).await;
        }
    }

    /// Ends the manager that a token owns, or gives it up where it waits for its owner, who
    /// does not want it any more. Returns what to wait for, if anything.
    ///
    /// # Errors
    /// As [`Managers::find`].
    pub fn close(&self, peer: Peer, token: &[u8]) -> Result<Option<JoinHandle<()>>, ManagerError> {
        let digest = record::token_digest(token);
        let own =
            |orphan: &Orphan| orphan.record.uid == peer.uid && orphan.record.token_digest == digest;
        let given_up = self.give_up(own);
        for orphan in &given_up {
            self.forget(&orphan.record, "its owner closed it");
        }
        match given_up.is_empty() {
            true => Ok(self.end(&self.find(peer, token)?, Reason::Closed)),
            false => Ok(None),
        }
    }

    /// Gives the manager of that name up if its owner is dead.
    pub(super) fn give_up_dead(&self, uid: u32, name: &str) {
        let dead = |orphan: &Orphan| {
            orphan.record.uid == uid && orphan.record.name == name && orphan.is_dead()
        };
        for orphan in self.give_up(dead) {
            self.forget(&orphan.record, "its owner is dead");
        }
    }

    fn give_up(&self, over: impl Fn(&Orphan) -> bool) -> Vec<Orphan> {
        let mut names = self.names();
        let over: Vec<String> = names
            .orphans
            .iter()
            .filter(|(_, orphan)| over(orphan))
            .map(|(digest, _)| digest.clone())
            .collect();
        over.iter()
            .filter_map(|digest| names.orphans.remove(digest))
            .collect()
    }
}

//! Managers of a dead daemon: kept for their owners, who hand back what they hold.
//!
//! A record names every allocation of a manager, but only its client still holds their
//! descriptors. With them the successor has the ring, the residents, the page of slot
//! words and, from the state directory, the journal: the engine goes on where it was.

use std::{
    collections::{HashMap, HashSet},
    os::fd::{AsFd as _, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use flextensord_device::{
    control::ControlPage,
    device::Label,
    failpoint::{self, Point},
    journal::JournalFile,
    process::{Peer, Process, start_time},
};
use flextensord_proto::v1::lease_ended::Reason;
use tokio::{task::JoinHandle, time};

use super::{
    error::ManagerError,
    manager::{Manager, Token},
    model::{Layer, Model, Part, Structure},
    record::{self, AllocationRecord, FORMAT, ManagerRecord, PlanRecord},
    registration,
    registry::Managers,
};
use crate::{
    transfer::{managed::ManagedDevice, memory::Allocation, memory::Reservation},
    weights::{manifest::Manifest, registry::Attachment},
};

/// How often managers that nobody has taken up are looked at.
const LOOK: Duration = Duration::from_millis(200);

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
                if !orphan.record.plans.is_empty() && handed.controls.is_empty() {
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
        let refused = |why: String| ManagerError::NotAdopted {
            name: record.name.clone(),
            why,
        };
        // of several versions only the last is in force; there is no other yet
        if let Some((plan, attachment)) = record.plans.iter().zip(attachments).next_back() {
            let (model, journal) =
                model(&manager, plan, attachment, &mut handed, self).map_err(refused)?;
            failpoint::pass(Point::AdoptRing)?;
            manager.holds.blocking_lock().restore(handed.holds);
            registration::install(self, &manager, &Arc::new(model), journal)?;
        }
        // the owner may be another process by now
        let record = ManagerRecord {
            pid: peer.pid,
            pid_started: manager.owner_started,
            ..record
        };
        self.state().write(&record::name(record.id), &record)?;
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
        let journals = record.plans.iter().map(|plan| plan.journal.clone());
        for file in journals.chain([record::name(record.id)]) {
            if let Err(error) = self.state().remove(&file) {
                tracing::warn!(file, %error, "state of a manager left behind");
            }
        }
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

/// The model of a plan, from its record and what was handed back; the reason when the two
/// do not agree.
fn model(
    manager: &Manager,
    record: &PlanRecord,
    attachment: Attachment,
    handed: &mut HandedBack,
    managers: &Managers,
) -> Result<(Model, Option<JournalFile>), String> {
    let text = |error: &dyn std::error::Error| error.to_string();
    let structure = structure(record, attachment.set().manifest())?;
    if record.plan.places.len() != structure.parts.len() {
        return Err("its plan is of other parts".to_owned());
    }
    let identity = registration::identity(manager, &structure, record.version);
    let control = handed
        .controls
        .remove(&record.version)
        .ok_or("its control page was not handed back")?;
    let control = ControlPage::take_back(control.as_fd(), identity).map_err(|e| text(&e))?;
    let device = &manager.device;
    let mut take = |memory: &AllocationRecord| -> Result<Allocation, String> {
        failpoint::pass(Point::AdoptMemory).map_err(|e| text(&e))?;
        let descriptor = handed
            .memory
            .remove(&memory.id)
            .ok_or_else(|| format!("allocation {} was not handed back", memory.id))?;
        let label = Label {
            instance: device.memory.instance().to_owned(),
            allocation: memory.id,
            random: record::unhex(&memory.random).ok_or("a label is not legal")?,
        };
        let taken = device
            .memory
            .device()
            .take_back(descriptor, memory.bytes, &label);
        taken
            .map(|memory| Allocation { memory, label })
            .map_err(|e| text(&e))
    };
    let set = attachment.set();
    let keys = registration::block_keys(manager.owner.uid, set, &structure, &record.plan);
    if keys.len() != record.blocks.len() {
        return Err("its plan has other blocks".to_owned());
    }
    let mut blocks = Vec::with_capacity(keys.len());
    for (key, memory) in keys.into_iter().zip(&record.blocks) {
        blocks.push(device.residents.adopt(key, memory.id, || take(memory))?);
    }
    let ring = record.ring.as_ref().map(&mut take).transpose()?;
    let journal = match &ring {
        Some(_) => {
            let path = managers.state().path().join(&record.journal);
            Some(JournalFile::open(&path, identity).map_err(|e| text(&e))?)
        }
        None => None,
    };
    let model = Model {
        attachment,
        plan_version: record.version,
        control: Arc::new(control),
        blocks,
        ring,
        requested: record.requested,
        granted: record.granted,
        shared_bytes: record.shared_bytes,
        least_feasible: record.plan.least_feasible,
        structure,
        plan: record.plan.clone(),
    };
    Ok((model, journal))
}

/// Layers and parts as they were registered.
fn structure(record: &PlanRecord, manifest: &Manifest) -> Result<Structure, String> {
    let mut structure = Structure {
        unregistered: record.unregistered,
        ..Structure::default()
    };
    for part in &record.parts {
        let storage = manifest.storages().get(part.storage as usize);
        let storage = storage.ok_or("a part is of no storage")?;
        if part
            .tensors
            .iter()
            .any(|at| *at >= manifest.tensors().len())
        {
            return Err("a part has a tensor that is not there".to_owned());
        }
        structure.parts.push(Part {
            storage: part.storage,
            segment_offset: storage.offset,
            bytes: storage.bytes,
            tensors: part.tensors.clone(),
        });
    }
    for (name, parts) in &record.layers {
        if parts
            .iter()
            .any(|part| *part as usize >= structure.parts.len())
        {
            return Err(format!("layer {name:?} has a part that is not there"));
        }
        structure.index.insert(name.clone(), structure.layers.len());
        structure.layers.push(Layer {
            name: name.clone(),
            parts: parts.clone(),
        });
    }
    Ok(structure)
}

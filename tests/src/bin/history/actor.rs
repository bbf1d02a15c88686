//! A client process that does random things until its standard input ends.

use std::{
    collections::HashMap,
    io::{self, Read as _},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

use clap::Args;
use flextensord_client::{
    Budget, ClientError, Hold, LayerSpec, LoadOptions, OpenOptions,
    blocking::{Client, Manager},
};
use flextensord_tests::{SceneError, checkpoint, daemon::options};
use serde_json::{Value, json};

use crate::{
    random::Random,
    record::{self, Answer, What},
};

/// Names of managers and of weight sets that all actors use.
pub(crate) const MANAGERS: usize = 6;
pub(crate) const SETS: usize = 3;
/// Longest wait of each call, and the patience.
const LIMIT: Duration = Duration::from_secs(20);

/// How an actor is told what to do.
#[derive(Debug, Args)]
pub(crate) struct ActorFlags {
    #[arg(long)]
    pub(crate) socket: PathBuf,
    #[arg(long)]
    pub(crate) directory: PathBuf,
    #[arg(long)]
    pub(crate) seed: u64,
}

/// The checkpoint of a content.
pub(crate) fn file(directory: &Path, content: u64) -> PathBuf {
    directory.join(format!("content-{content}.safetensors"))
}

type Contents = [HashMap<String, Vec<u8>>; 2];

struct Actor {
    client: Client,
    directory: PathBuf,
    random: Random,
    contents: Contents,
    layers: Vec<LayerSpec>,
    manager: Option<Manager>,
    /// The set that its model is of, and which content that has.
    set: Option<(String, u64)>,
}

/// What came of a call, and whatever else of it is worth a word.
type Outcome = (Answer, Value);

pub(crate) fn act(flags: &ActorFlags) -> Result<(), SceneError> {
    let is_over = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&is_over);
    thread::spawn(move || {
        // whatever ends the input ends the actor
        let _: io::Result<usize> = io::stdin().read_to_end(&mut Vec::new());
        told.store(true, SeqCst);
    });
    let read = |content| -> Result<HashMap<String, Vec<u8>>, SceneError> {
        let tensors = checkpoint::read(&file(&flags.directory, content))?;
        Ok(tensors.into_iter().map(|t| (t.name, t.data)).collect())
    };
    let contents = [read(0)?, read(1)?];
    let mut names: Vec<&String> = contents[0].keys().collect();
    names.sort();
    let layers = names
        .chunks(2)
        .enumerate()
        .map(|(number, tensors)| LayerSpec {
            name: format!("l{number}"),
            tensors: tensors.iter().map(|name| (*name).clone()).collect(),
        });
    let mut options = options(&flags.socket);
    (options.patience, options.call_timeout, options.long_timeout) = (LIMIT, LIMIT, LIMIT);
    let client = loop {
        match Client::connect(options.clone()) {
            Ok(client) => break client,
            // a daemon that is being started again
            Err(_) if !is_over.load(SeqCst) => thread::sleep(Duration::from_millis(20)),
            Err(error) => return Err(error.into()),
        }
    };
    let mut actor = Actor {
        client,
        directory: flags.directory.clone(),
        random: Random::new(flags.seed),
        layers: layers.collect(),
        contents,
        manager: None,
        set: None,
    };
    while !is_over.load(SeqCst) {
        actor.step()?;
        thread::sleep(Duration::from_millis(actor.random.below(20)));
    }
    if actor.manager.is_some() {
        actor.close()?;
    }
    Ok(())
}

/// The answer in an error; one that no program should get is none.
fn judge(error: ClientError) -> Result<Outcome, SceneError> {
    let answer = match &error {
        ClientError::LeaseLost { .. } | ClientError::DaemonLost { .. } => Answer::Lost,
        ClientError::Refused(failure) => match failure.kind.as_str() {
            "LEASE_LOST" => Answer::Lost,
            "RECOVERING" | "ABORTED" => Answer::Unknown,
            // what no actor does anything for, with all that is known
            "FAILED_PRECONDITION" | "UNKNOWN_HOLD" | "INTERNAL" => return Err(error.into()),
            kind => Answer::Refused(kind.to_owned()),
        },
        ClientError::Transport { .. }
        | ClientError::Unreachable { .. }
        | ClientError::Channel { .. } => Answer::Unknown,
        _ => return Err(error.into()),
    };
    Ok((answer, json!({ "error": error.to_string() })))
}

fn say(
    what: What,
    name: &str,
    content: Option<u64>,
    call: impl FnOnce() -> Result<Value, ClientError>,
) -> Result<Answer, SceneError> {
    record::begin(what, name, content);
    let (answer, more) = match call() {
        Ok(more) => (Answer::Ok, more),
        Err(error) => judge(error)?,
    };
    record::end(&answer, &more);
    Ok(answer)
}

impl Actor {
    fn step(&mut self) -> Result<(), SceneError> {
        match (
            self.random.below(10),
            self.manager.is_some(),
            self.set.is_some(),
        ) {
            (0, _, _) => self.look(),
            (1, _, _) => self.load(),
            (2, _, _) if self.random.below(3) == 0 => self.drop_set(),
            (3, _, _) if self.random.below(8) == 0 => self.terminate(),
            (4, true, _) if self.random.below(3) == 0 => self.close(),
            (_, false, _) => self.open(),
            (_, true, false) => self.register(),
            (_, true, true) => self.pass(),
        }
    }

    fn set_name(&mut self) -> String {
        format!("set-{}", self.random.below(SETS as u64))
    }

    fn manager_name(&mut self) -> String {
        format!("m-{}", self.random.below(MANAGERS as u64))
    }

    fn open(&mut self) -> Result<(), SceneError> {
        // sometimes whatever name is free
        let name = match self.random.below(6) {
            0 => String::new(),
            _ => self.manager_name(),
        };
        let options = OpenOptions {
            name: name.clone(),
            ..OpenOptions::default()
        };
        let mut opened = None;
        let answer = say(What::Open, &name, None, || {
            let manager = self.client.open(options)?;
            let epoch = manager.asynchronous()?.lease_epoch();
            let more = json!({ "name": manager.name(), "epoch": epoch });
            opened = Some(manager);
            Ok(more)
        })?;
        expect(&answer, "open", &["MANAGER_TAKEN"])?;
        if let Some(manager) = &mut opened {
            manager.set_acquire_limit(LIMIT);
        }
        self.manager = opened;
        Ok(())
    }

    fn register(&mut self) -> Result<(), SceneError> {
        let name = self.set_name();
        let Some(manager) = self.manager.as_mut() else {
            return Ok(());
        };
        let (layers, contents) = (&self.layers, &self.contents);
        let mut seen = None;
        let mut wrong = false;
        let answer = say(What::Register, &name, None, || {
            manager.register(&name, layers, Budget::Bytes(60_000))?;
            let layer = manager.layer(&layers[0].name)?;
            seen = content_of(&manager.acquire(layer)?, contents)?;
            wrong = seen.is_none();
            Ok(json!({ "content": seen }))
        })?;
        if wrong {
            let text = format!("{name} has bytes of neither content");
            return Err(SceneError::Unexpected(text));
        }
        match (answer, seen) {
            (Answer::Ok, Some(content)) => self.set = Some((name, content)),
            (Answer::Refused(kind), _) if kind == "NOT_FOUND" || kind == "DEVICE_MEMORY" => {}
            (Answer::Refused(kind), _) => {
                return Err(SceneError::Unexpected(format!("register refused: {kind}")));
            }
            // half a registration: a program would begin again
            _ => self.manager = None,
        }
        Ok(())
    }

    /// Some layers in any order, by either way; every byte is compared.
    fn pass(&mut self) -> Result<(), SceneError> {
        let (Some(manager), Some((name, content))) = (&self.manager, &self.set) else {
            return Ok(());
        };
        let random = &mut self.random;
        let mut wrong = None;
        let answer = say(What::Use, manager.name(), None, || {
            for _ in 0..4 {
                let at = random.below(self.layers.len() as u64);
                let layer = &self.layers[usize::try_from(at).unwrap_or(0)];
                let id = manager.layer(&layer.name)?;
                let hold = match random.below(3) {
                    0 => manager.acquire_rpc(id)?,
                    _ => manager.acquire(id)?,
                };
                let found = content_of(&hold, &self.contents)?;
                if found != Some(*content) {
                    wrong = Some(format!("{name} {}: {found:?}, not {content}", layer.name));
                }
                match hold.is_rpc() {
                    true => manager.release_rpc(hold)?,
                    false => hold.release()?,
                }
            }
            manager.report_pass(1)?;
            Ok(json!({}))
        })?;
        match (wrong, answer) {
            (Some(text), _) => Err(SceneError::Unexpected(format!("wrong bytes: {text}"))),
            (None, Answer::Refused(kind)) => {
                Err(SceneError::Unexpected(format!("use refused: {kind}")))
            }
            (None, Answer::Ok) => Ok(()),
            (None, Answer::Lost | Answer::Unknown) => {
                if matches!(answer_of(manager), Answer::Lost) {
                    (self.manager, self.set) = (None, None);
                }
                Ok(())
            }
        }
    }

    fn close(&mut self) -> Result<(), SceneError> {
        let Some(manager) = self.manager.take() else {
            return Ok(());
        };
        self.set = None;
        let name = manager.name().to_owned();
        say(What::Close, &name, None, || {
            manager.close().map(|()| json!({}))
        })?;
        Ok(())
    }

    fn load(&mut self) -> Result<(), SceneError> {
        let (name, content) = (self.set_name(), self.random.below(2));
        let path = file(&self.directory, content);
        let answer = say(What::Load, &name, Some(content), || {
            let loaded = self
                .client
                .load(&path, &name, &LoadOptions::default(), |_| ())?;
            Ok(json!({ "attached": loaded.attached }))
        })?;
        expect(
            &answer,
            "load",
            &["CONTENT_DIFFERS", "TOO_MANY", "HOST_MEMORY"],
        )
    }

    fn drop_set(&mut self) -> Result<(), SceneError> {
        let name = self.set_name();
        let answer = say(What::Drop, &name, None, || {
            self.client.drop_weight_set(&name).map(|_| json!({}))
        })?;
        expect(&answer, "drop", &["NOT_FOUND", "IN_USE"])
    }

    fn terminate(&mut self) -> Result<(), SceneError> {
        let name = self.manager_name();
        let answer = say(What::Terminate, &name, None, || {
            self.client.terminate(&name, None).map(|_| json!({}))
        })?;
        expect(&answer, "terminate", &["NOT_FOUND"])
    }

    fn look(&mut self) -> Result<(), SceneError> {
        let answer = say(What::Status, "", None, || {
            let managers = self.client.status()?.managers.into_iter();
            let listed: Vec<_> = managers.map(|m| json!([m.name, m.lease_epoch])).collect();
            Ok(json!({ "listed": listed }))
        })?;
        expect(&answer, "status", &[])
    }
}

/// Whether the lease is over.
fn answer_of(manager: &Manager) -> Answer {
    use flextensord_client::LeaseState::{DaemonLost, Detached, Ended, Live};
    match manager.lease_state() {
        Live | Detached => Answer::Ok,
        Ended | DaemonLost => Answer::Lost,
    }
}

fn expect(answer: &Answer, what: &str, kinds: &[&str]) -> Result<(), SceneError> {
    match answer {
        Answer::Refused(kind) if !kinds.contains(&kind.as_str()) => {
            Err(SceneError::Unexpected(format!("{what} refused: {kind}")))
        }
        _ => Ok(()),
    }
}

/// Which content all tensors of a hold have.
fn content_of(hold: &Hold, contents: &Contents) -> Result<Option<u64>, ClientError> {
    for (content, bytes) in (0..).zip(contents) {
        let mut all = true;
        for tensor in hold.tensors() {
            all &= match bytes.get(tensor.name()) {
                Some(expected) => tensor.equals(expected)?,
                None => false,
            };
        }
        if all {
            return Ok(Some(content));
        }
    }
    Ok(None)
}

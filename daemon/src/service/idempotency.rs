//! Calls that a client may send again: the same id gets the same answer, once done.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use flextensord_proto::{
    kind::{Failure, Kind, Origin},
    limit,
};
use tokio::sync::watch;

use super::failure::invalid_argument;

/// Most ids that are kept, of all users and of one.
const ENTRIES: usize = 4096;
const ENTRIES_OF_USER: usize = 1024;
/// How long an answer is kept.
const LIFETIME: Duration = Duration::from_secs(600);
/// How long a repeated call waits for the first one.
const PATIENCE: Duration = Duration::from_secs(30 * 60);

/// User and id.
type Key = (u32, String);

/// The answers of one RPC by user and request id. Errors are not kept: a call with the
/// id of one that failed runs anew.
#[derive(Debug)]
pub struct Idempotency<R> {
    entries: Mutex<HashMap<Key, Entry<R>>>,
}

#[derive(Debug)]
struct Entry<R> {
    content: blake3::Hash,
    since: Instant,
    answer: watch::Receiver<Option<R>>,
}

impl<R> Entry<R> {
    fn is_running(&self) -> bool {
        // without a sender nobody will answer: the call was abandoned
        self.answer.borrow().is_none() && self.answer.has_changed().is_ok()
    }
}

/// What a call is to do.
#[derive(Debug)]
pub enum Turn<R> {
    /// It is the first with its id: do the work, then [`First::complete`].
    First(First<R>),
    /// An earlier call had this answer.
    Answer(R),
}

impl<R> Default for Idempotency<R> {
    fn default() -> Self {
        Self {
            entries: Mutex::default(),
        }
    }
}

impl<R: Clone> Idempotency<R> {
    /// Says whether the call `id` of `uid` is the first; waits while the first is under
    /// way. `content` are the parts of the request that a repeated call must have the
    /// same.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for an id of illegal length, or one that was used with other
    /// content; `TOO_MANY` when too many calls are under way; `DEADLINE_EXCEEDED` when
    /// the first call takes too long.
    pub async fn enter(
        self: &Arc<Self>,
        uid: u32,
        id: &str,
        content: &[&[u8]],
    ) -> Result<Turn<R>, Failure> {
        if !limit::REQUEST_ID_BYTES.contains(&id.len()) {
            let rule = format!("{:?} bytes", limit::REQUEST_ID_BYTES);
            return Err(invalid_argument("request_id", id, &rule));
        }
        let key = (uid, id.to_owned());
        let content = digest(content);
        let waiting = async {
            loop {
                let mut answer = match self.look(&key, content, false)? {
                    Look::First(first) => return Ok(Turn::First(first)),
                    Look::Wait(answer) => answer,
                };
                // an error says that the first call failed: then it is our turn
                if let Ok(answer) = answer.wait_for(Option::is_some).await
                    && let Some(answer) = answer.clone()
                {
                    return Ok(Turn::Answer(answer));
                }
            }
        };
        tokio::time::timeout(PATIENCE, waiting)
            .await
            .unwrap_or_else(|_| {
                Err(Failure::new(
                    Kind::DeadlineExceeded,
                    Origin::Daemon,
                    format!("the first call with request_id {id:?} is still under way"),
                )
                .with("limit", format!("{} s", PATIENCE.as_secs())))
            })
    }

    /// The answer of the call `id` of `uid`: an earlier one's, or that of `work`.
    ///
    /// # Errors
    /// As [`Idempotency::enter`], or what the work says.
    pub async fn once(
        self: &Arc<Self>,
        uid: u32,
        id: &str,
        content: &[&[u8]],
        work: impl Future<Output = Result<R, Failure>>,
    ) -> Result<R, Failure> {
        match self.enter(uid, id, content).await? {
            Turn::Answer(answer) => Ok(answer),
            Turn::First(first) => {
                let answer = work.await?;
                first.complete(answer.clone());
                Ok(answer)
            }
        }
    }

    /// The answer of the call `id` of `uid`, which its caller never saw; waits while it is
    /// under way. `None` when it failed, or never came: then it will be refused should it
    /// come yet.
    ///
    /// # Errors
    /// `TOO_MANY` when there is no room to remember the id.
    pub async fn abandon(self: &Arc<Self>, uid: u32, id: &str) -> Result<Option<R>, Failure> {
        let abandoned = digest(&[b"abandoned"]);
        match self.look(&(uid, id.to_owned()), abandoned, true)? {
            Look::First(first) => {
                first.keep();
                Ok(None)
            }
            Look::Wait(mut answer) => {
                let waited = tokio::time::timeout(PATIENCE, answer.wait_for(Option::is_some));
                Ok(waited
                    .await
                    .ok()
                    .and_then(Result::ok)
                    .and_then(|answer| answer.clone()))
            }
        }
    }

    fn look(
        self: &Arc<Self>,
        key: &Key,
        content: blake3::Hash,
        any: bool,
    ) -> Result<Look<R>, Failure> {
        let mut entries = self.entries();
        let now = Instant::now();
        if let Some(entry) = entries.get(key)
            && (entry.is_running() || entry.since + LIFETIME > now)
        {
            if entry.content != content && !any {
                let rule = "was used with another request";
                return Err(invalid_argument("request_id", &key.1, rule));
            }
            return Ok(Look::Wait(entry.answer.clone()));
        }
        make_room(&mut entries, key.0, now)?;
        let (sender, answer) = watch::channel(None);
        let entry = Entry {
            content,
            since: now,
            answer,
        };
        entries.insert(key.clone(), entry);
        let map = Arc::clone(self);
        let key = key.clone();
        Ok(Look::First(First {
            map,
            key,
            sender,
            kept: false,
        }))
    }
}

impl<R> Idempotency<R> {
    fn entries(&self) -> MutexGuard<'_, HashMap<Key, Entry<R>>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum Look<R> {
    First(First<R>),
    Wait(watch::Receiver<Option<R>>),
}

/// The right, and the duty, to do the work of a call. Dropped without an answer, the
/// next call with the id does it.
#[derive(Debug)]
pub struct First<R> {
    map: Arc<Idempotency<R>>,
    key: Key,
    sender: watch::Sender<Option<R>>,
    kept: bool,
}

impl<R> First<R> {
    /// Keeps the answer for calls with the same id.
    pub fn complete(self, answer: R) {
        if let Some(entry) = self.map.entries().get_mut(&self.key) {
            entry.since = Instant::now();
        }
        self.sender.send_replace(Some(answer));
    }
}

impl<R> First<R> {
    /// Keeps the id without an answer: no call will ever have one.
    fn keep(mut self) {
        self.kept = true;
    }
}

impl<R> Drop for First<R> {
    fn drop(&mut self) {
        if !self.kept && self.sender.borrow().is_none() {
            self.map.entries().remove(&self.key);
        }
    }
}

/// Lengths keep neighbouring parts apart.
fn digest(content: &[&[u8]]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for part in content {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    hasher.finalize()
}

/// Forgets old answers, the user's own oldest first where it has its share.
fn make_room<R>(
    entries: &mut HashMap<Key, Entry<R>>,
    uid: u32,
    now: Instant,
) -> Result<(), Failure> {
    let own = |entries: &HashMap<Key, Entry<R>>| entries.keys().filter(|k| k.0 == uid).count();
    if entries.len() >= ENTRIES || own(entries) >= ENTRIES_OF_USER {
        entries.retain(|_, entry| entry.is_running() || entry.since + LIFETIME > now);
    }
    for (is_full, of_user) in [
        (own(entries) >= ENTRIES_OF_USER, Some(uid)),
        (entries.len() >= ENTRIES, None),
    ] {
        if !is_full {
            continue;
        }
        let oldest = entries
            .iter()
            .filter(|(key, entry)| of_user.is_none_or(|uid| key.0 == uid) && !entry.is_running())
            .min_by_key(|(_, entry)| entry.since)
            .map(|(key, _)| key.clone());
        let Some(oldest) = oldest else {
            let limit = of_user.map_or(ENTRIES, |_| ENTRIES_OF_USER);
            let text = format!("{limit} calls are under way, the limit");
            return Err(Failure::new(Kind::TooMany, Origin::Client, text).with("limit", limit));
        };
        entries.remove(&oldest);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123456789abcdef";

    async fn first(map: &Arc<Idempotency<u32>>, id: &str) -> First<u32> {
        match map.enter(1, id, &[b"x"]).await.unwrap() {
            Turn::First(first) => first,
            Turn::Answer(_) => panic!("not the first"),
        }
    }

    #[tokio::test]
    async fn a_repeated_call_waits_for_the_first_and_has_its_answer() {
        let map = Arc::new(Idempotency::default());
        let running = first(&map, ID).await;
        let again = {
            let map = Arc::clone(&map);
            tokio::spawn(async move { map.enter(1, ID, &[b"x"]).await })
        };
        tokio::task::yield_now().await;
        running.complete(7);
        assert!(matches!(again.await.unwrap(), Ok(Turn::Answer(7))));
        assert!(matches!(
            map.enter(1, ID, &[b"x"]).await,
            Ok(Turn::Answer(7))
        ));
        // another user's id is another id
        assert!(matches!(
            map.enter(2, ID, &[b"x"]).await,
            Ok(Turn::First(_))
        ));
    }

    #[tokio::test]
    async fn a_call_that_was_abandoned_before_it_came_is_refused() {
        let map = Arc::new(Idempotency::<u32>::default());
        assert_eq!(map.abandon(1, ID).await, Ok(None));
        assert!(map.enter(1, ID, &[b"x"]).await.is_err());
        assert_eq!(map.abandon(1, ID).await, Ok(None));
        let other = "another-one-of-16";
        first(&map, other).await.complete(7);
        assert_eq!(map.abandon(1, other).await, Ok(Some(7)));
    }

    #[tokio::test]
    async fn a_failed_call_is_not_remembered() {
        let map = Arc::new(Idempotency::<u32>::default());
        let running = first(&map, ID).await;
        let again = {
            let map = Arc::clone(&map);
            tokio::spawn(async move { map.enter(1, ID, &[b"x"]).await })
        };
        tokio::task::yield_now().await;
        drop(running);
        assert!(matches!(again.await.unwrap(), Ok(Turn::First(_))));
        drop(first(&map, ID).await);
    }

    #[tokio::test]
    async fn ids_of_illegal_length_or_with_other_content_are_refused() {
        let map = Arc::new(Idempotency::<u32>::default());
        for id in ["", "short", &"x".repeat(129)] {
            let error = map.enter(1, id, &[]).await.unwrap_err();
            assert_eq!(error.kind, Kind::InvalidArgument);
        }
        first(&map, ID).await.complete(1);
        for other in [&[b"y".as_slice()][..], &[b"x", b""], &[]] {
            let error = map.enter(1, ID, other).await.unwrap_err();
            assert_eq!(error.kind, Kind::InvalidArgument);
        }
    }

    #[tokio::test]
    async fn a_user_fills_only_its_own_share() {
        let map = Arc::new(Idempotency::default());
        let mut running = Vec::new();
        for n in 0..ENTRIES_OF_USER {
            running.push(first(&map, &format!("{n:016}")).await);
        }
        let error = map.enter(1, ID, &[]).await.unwrap_err();
        assert_eq!(error.kind, Kind::TooMany);
        assert!(matches!(map.enter(2, ID, &[]).await, Ok(Turn::First(_))));
        running.remove(0).complete(5);
        first(&map, ID).await.complete(6);
        assert_eq!(map.entries().len(), ENTRIES_OF_USER);
    }
}

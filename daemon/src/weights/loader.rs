//! Reads a checkpoint's bytes with several threads, into a segment or past it, and
//! hashes each block while it is in cache.

use std::{
    collections::VecDeque,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use flextensord_device::segment;

use super::{
    checkpoint::{Checkpoint, Place},
    digest::{self, BLOCK, Digest},
    error::WeightError,
};

/// Bytes that are read before they are hashed: they must still be in a core's own cache
/// then. With whole blocks a load with digest ran at 62 % of one without, so at 73 %.
const RUN: usize = 256 << 10;

/// What a load tells its caller while it runs. All methods may be called from several
/// threads at a time and must not block.
pub trait Watch: Sync {
    /// `done` of `total` bytes are read. Calls of one reading may come out of order; a
    /// `done` of 0 begins a new one.
    fn progress(&self, done: u64, total: u64);
    /// Whether the caller has given up.
    fn is_cancelled(&self) -> bool;
}

/// A flag that a caller sets to give up. It reports no progress.
#[derive(Debug, Default)]
pub struct Cancel(AtomicBool);

impl Cancel {
    /// Asks the work to stop soon.
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Watch for Cancel {
    fn progress(&self, _done: u64, _total: u64) {}

    fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// How a checkpoint is read.
#[derive(Debug, Clone, Copy)]
pub struct Reading {
    /// Threads that read; at least 1.
    pub threads: usize,
    /// Whether blocks are hashed.
    pub hash: bool,
}

/// One read: a block of a storage and where it goes.
struct Job<'a> {
    storage: usize,
    block: usize,
    place: Place,
    skip: u64,
    length: usize,
    target: Option<&'a mut [u8]>,
}

/// Reads all of `checkpoint`, into `segment` if there is one (which must have the bytes
/// of its manifest). Returns the tensors' digests in the order of the manifest if they
/// are asked for.
///
/// # Errors
/// [`WeightError::CheckpointChanged`] when a file is shorter than it was, or was changed
/// by the time all is read; [`WeightError::Read`]; [`WeightError::Aborted`] when
/// cancelled. The segment is garbage then.
pub fn read(
    checkpoint: &Checkpoint,
    segment: Option<&mut [u8]>,
    reading: Reading,
    watch: &dyn Watch,
) -> Result<Option<Vec<Digest>>, WeightError> {
    let mut jobs = jobs(checkpoint, segment)?;
    // as the files lie, so that the kernel reads ahead
    jobs.make_contiguous()
        .sort_by_key(|job| (job.place.order(), job.skip));
    let count = jobs.len();
    let total = checkpoint.manifest().logical_bytes();
    let done = AtomicU64::new(0);
    watch.progress(0, total);
    let stopped = AtomicBool::new(false);
    let jobs = Mutex::new(jobs);
    let next = || {
        if stopped.load(Ordering::Relaxed) {
            return None;
        }
        jobs.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop_front()
    };
    let work = || -> Result<Vec<(usize, usize, Digest)>, WeightError> {
        let mut buffer = Vec::new();
        let mut hashed = Vec::new();
        while let Some(job) = next() {
            let read = run(checkpoint, job, &mut buffer, reading.hash, watch);
            let (storage, block, length, digest) =
                read.inspect_err(|_| stopped.store(true, Ordering::Relaxed))?;
            if let Some(digest) = digest {
                hashed.push((storage, block, digest));
            }
            let now = done.fetch_add(length, Ordering::Relaxed) + length;
            watch.progress(now, total);
        }
        Ok(hashed)
    };
    let results = std::thread::scope(|scope| {
        let others: Vec<_> = (1..reading.threads.clamp(1, count.max(1)))
            .map(|_| scope.spawn(work))
            .collect();
        let mut results = vec![work()];
        for other in others {
            let crashed = || Err(WeightError::Internal("a reading thread ended"));
            results.push(other.join().unwrap_or_else(|_| crashed()));
        }
        results
    });
    let hashed = results.into_iter().collect::<Result<Vec<_>, _>>()?;
    checkpoint.check_unchanged()?;
    Ok(reading
        .hash
        .then(|| combine(checkpoint, hashed.into_iter().flatten())))
}

fn run(
    checkpoint: &Checkpoint,
    job: Job<'_>,
    buffer: &mut Vec<u8>,
    hash: bool,
    watch: &dyn Watch,
) -> Result<(usize, usize, u64, Option<Digest>), WeightError> {
    if watch.is_cancelled() {
        return Err(WeightError::gone("load"));
    }
    let target = match job.target {
        Some(target) => {
            segment::populate(target);
            target
        }
        None => {
            buffer.resize(job.length, 0);
            buffer.as_mut_slice()
        }
    };
    let mut hasher = digest::BlockHasher::default();
    let mut skip = job.skip;
    for run in target.chunks_mut(RUN) {
        checkpoint.read(job.place, skip, run)?;
        skip = skip.saturating_add(run.len() as u64);
        if hash {
            hasher.update(run);
        }
    }
    let digest = hash.then(|| hasher.finish());
    Ok((job.storage, job.block, job.length as u64, digest))
}

fn jobs<'a>(
    checkpoint: &Checkpoint,
    mut segment: Option<&'a mut [u8]>,
) -> Result<VecDeque<Job<'a>>, WeightError> {
    const SHORT: WeightError = WeightError::Internal("segment is shorter than its manifest");
    let mut jobs = VecDeque::new();
    let mut cursor = 0;
    let storages = checkpoint.manifest().storages().iter();
    for (storage, (entry, place)) in storages.zip(checkpoint.places()).enumerate() {
        let begin = usize::try_from(entry.offset).map_err(|_| SHORT)?;
        let mut left = usize::try_from(entry.bytes).map_err(|_| SHORT)?;
        let mut own = match segment.take() {
            Some(rest) => {
                let (_, rest) = rest.split_at_mut_checked(begin - cursor).ok_or(SHORT)?;
                let (own, rest) = rest.split_at_mut_checked(left).ok_or(SHORT)?;
                segment = Some(rest);
                cursor = begin + left;
                Some(own)
            }
            None => None,
        };
        let mut block = 0;
        while left > 0 {
            let length = left.min(BLOCK);
            let target = match own.take() {
                Some(rest) => {
                    let (target, rest) = rest.split_at_mut_checked(length).ok_or(SHORT)?;
                    own = Some(rest);
                    Some(target)
                }
                None => None,
            };
            let skip = (block * BLOCK) as u64;
            jobs.push_back(Job {
                storage,
                block,
                place: *place,
                skip,
                length,
                target,
            });
            left -= length;
            block += 1;
        }
    }
    Ok(jobs)
}

fn combine(
    checkpoint: &Checkpoint,
    hashed: impl Iterator<Item = (usize, usize, Digest)>,
) -> Vec<Digest> {
    let mut hashed: Vec<_> = hashed.collect();
    hashed.sort_unstable();
    let mut rest = hashed.into_iter().peekable();
    let storages = checkpoint.manifest().storages().iter().enumerate();
    storages
        .map(|(number, storage)| {
            let mut blocks = Vec::new();
            while let Some((_, _, digest)) = rest.next_if(|(of, _, _)| *of == number) {
                blocks.push(digest);
            }
            digest::tensor(storage.bytes, &blocks)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{
        super::checkpoint::fixture::{open, single},
        *,
    };

    const HASHED: Reading = Reading {
        threads: 3,
        hash: true,
    };

    #[test]
    fn bytes_arrive_in_place_and_hash_as_the_segment_does() {
        let big: Vec<u8> = (0..BLOCK * 2 + 100)
            .map(|i| u8::try_from(i % 251).unwrap())
            .collect();
        let files = single(&[("l.10", &big), ("l.2", b"abc"), ("e", b"")]);
        let checkpoint = open(files).unwrap();
        let manifest = checkpoint.manifest();
        let mut segment = vec![0; usize::try_from(manifest.segment_bytes()).unwrap()];
        let into = read(&checkpoint, Some(&mut segment), HASHED, &Cancel::default());
        let into = into.unwrap().unwrap();
        let start = usize::try_from(manifest.storages()[2].offset).unwrap();
        assert_eq!(&segment[start..start + big.len()], big);
        assert_eq!(
            digest::of_segment(manifest, &segment, 2),
            Some(into.clone())
        );
        let past = read(&checkpoint, None, HASHED, &Cancel::default()).unwrap();
        assert_eq!(past, Some(into));
        let one = Reading {
            threads: 1,
            hash: false,
        };
        assert_eq!(
            read(&checkpoint, None, one, &Cancel::default()).unwrap(),
            None
        );
    }

    #[test]
    fn a_cancelled_load_stops() {
        let checkpoint = open(single(&[("a", b"abc")])).unwrap();
        let cancel = Cancel::default();
        cancel.set();
        let error = read(&checkpoint, None, HASHED, &cancel).unwrap_err();
        assert!(matches!(error, WeightError::Aborted { .. }));
    }

    #[test]
    fn a_file_cut_while_it_is_read_is_a_change() {
        let files = single(&[("a", &[7; 5000])]);
        let behind = files[0].file.try_clone().unwrap();
        let checkpoint = open(files).unwrap();
        behind.set_len(1000).unwrap();
        let error = read(&checkpoint, None, HASHED, &Cancel::default()).unwrap_err();
        assert!(
            matches!(error, WeightError::CheckpointChanged { .. }),
            "{error}"
        );
    }

    #[test]
    fn a_segment_too_short_is_refused() {
        let checkpoint = open(single(&[("a", b"abc")])).unwrap();
        let mut short = [0; 2];
        assert!(read(&checkpoint, Some(&mut short), HASHED, &Cancel::default()).is_err());
    }
}

//! Fills the tensors of weights, on several threads.

use super::{
    Bank, Place,
    source::{Taken, pull_encoded, pull_rows},
};
use crate::{
    ffi::{Home, Room, Type},
    storage::Floats,
};
use sdrun_abi::{Error, ErrorCode, Flow, Host, Result, Weight, WeightSource, WeightSpec};
use sdrun_provider_common::{Preparation, weight};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
};

/// Maximum number of threads that place weights. Each thread holds one weight in memory.
const MAX_WORKERS: usize = 8;
/// Below this many bytes, starting threads costs more time than it saves.
const WORTH_THREADS: usize = 4 << 20;

impl Bank {
    /// Fetches the weights in `names` and writes them to the tensors that `task` selects. Returns the number of bytes
    /// that the source delivered.
    pub(super) fn pull(
        &mut self,
        names: &BTreeSet<String>,
        source: &dyn WeightSource,
        task: Task<'_>,
    ) -> Result<u64> {
        for name in names {
            self.spec(name)?;
        }
        let Bank { store, specs, preparation, places, .. } = self;
        let mut jobs: BTreeMap<&str, Job<'_>> = BTreeMap::new();
        for (name, spec) in specs.iter().filter(|(name, _)| names.contains(*name)) {
            jobs.insert(name, Job { spec, rooms: Vec::new() });
        }
        for (place, room) in places.iter().zip(store.rooms()?) {
            let wanted = match task.write {
                Write::Missing => !place.filled,
                Write::Nothing | Write::All => true,
            };
            if let Some(job) = jobs.get_mut(&*place.weight).filter(|_| wanted) {
                job.rooms.push((place, room));
            }
        }
        // Start with the largest, so that the end does not wait for one thread with a large weight.
        let mut jobs: Vec<Job<'_>> = jobs.into_values().collect();
        jobs.sort_by_key(|job| std::cmp::Reverse(job.bytes()));
        let worth = jobs.iter().map(Job::bytes).sum::<usize>() >= WORTH_THREADS;
        let workers = if worth { task.threads.clamp(1, MAX_WORKERS) } else { 1 };
        let queue = Queue {
            jobs: Mutex::new(jobs.into_iter()),
            preparation,
            done: AtomicUsize::new(task.before),
            bytes: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        };
        thread::scope(|scope| {
            let others: Vec<_> = (1..workers).map(|_| scope.spawn(|| queue.work(source, task))).collect();
            let mut result = queue.work(source, task);
            for other in others {
                let other = other
                    .join()
                    .unwrap_or_else(|_| Err(Error::internal("panic in a thread that places weights")));
                result = result.and(other);
            }
            result
        })?;
        Ok(queue.bytes.into_inner())
    }
}

/// Settings of one pass over the weights.
#[derive(Clone, Copy)]
pub(super) struct Task<'a> {
    pub(super) phase: &'a str,
    pub(super) threads: usize,
    /// Receives the progress and may cancel.
    pub(super) host: Option<&'a dyn Host>,
    pub(super) write: Write,
    /// Total number of weights, and how many of them were placed earlier.
    pub(super) total: usize,
    pub(super) before: usize,
}

/// The tensors that a weight is written to.
#[derive(Clone, Copy)]
pub(super) enum Write {
    /// None: only check that the source has the weight.
    Nothing,
    /// The tensors that do not contain the weight yet.
    Missing,
    All,
}

impl Task<'_> {
    /// Reports how many weights are done.
    pub(super) fn step(&self, done: usize) -> Result<()> {
        let cancels =
            |host: &dyn Host| host.progress(self.phase, done as u64, self.total as u64) == Flow::Cancel;
        if self.host.is_some_and(cancels) {
            let message = format!("placing the weights was cancelled ({})", self.phase);
            return Err(Error::new(ErrorCode::Cancelled, message));
        }
        Ok(())
    }
}

/// A weight and all tensors that hold it.
struct Job<'a> {
    spec: &'a WeightSpec,
    rooms: Vec<(&'a Place, Room<'a>)>,
}

impl Job<'_> {
    fn bytes(&self) -> usize {
        self.spec.dtype.bytes_of(&self.spec.shape).unwrap_or(usize::MAX >> 32)
    }

    /// Finds out whether the source has the weight, without fetching it where it can. Returns the number of bytes to
    /// deliver.
    fn look(&self, source: &dyn WeightSource) -> Result<usize> {
        let (mut plain, mut bytes) = (self.rooms.is_empty(), 0);
        for (place, _) in &self.rooms {
            match pull_encoded(source, self.spec, place.form, false)? {
                Some((_, weight)) => bytes += weight.data().len(),
                None => plain = true,
            }
        }
        if plain {
            source.check(&self.spec.name)?;
            bytes += self.bytes();
        }
        Ok(bytes)
    }

    /// Fetches the weight and writes it: in blocks if the source has blocks that a tensor stores unchanged, or by rows while the source
    /// computes them. Returns the number of bytes that the source delivered.
    fn place(&mut self, source: &dyn WeightSource) -> Result<usize> {
        let whole = self.bytes();
        let Job { spec, rooms } = self;
        if rooms.is_empty() {
            return self.look(source);
        }
        let (mut plain, mut bytes) = (None, 0);
        // Several tensors share what `get` computes.
        let alone = rooms.len() == 1;
        for (place, room) in rooms {
            if let Some((taken, weight)) = pull_encoded(source, spec, place.form, alone)? {
                bytes += weight.data().len();
                room.fill(|out| match taken {
                    Taken::Blocks(encoding) => place.form.fill_encoded(encoding, weight.data(), out),
                    Taken::Values(dtype, form) => form.fill(place.type_, dtype, weight.data(), out),
                })?;
                continue;
            }
            if alone
                && place.home == Home::Host
                && room.fill(|out| pull_rows(source, spec, (place.form, place.type_), out))?
            {
                bytes += whole;
                continue;
            }
            let weight: &Weight<'_> = match &plain {
                Some(weight) => weight,
                None => {
                    let weight = plain.insert(weight(source, spec)?);
                    bytes += weight.data().len();
                    weight
                }
            };
            room.fill(|out| place.form.fill(place.type_, weight.dtype, weight.data(), out))?;
        }
        Ok(bytes)
    }
}

struct Queue<'a> {
    jobs: Mutex<std::vec::IntoIter<Job<'a>>>,
    preparation: &'a Preparation,
    done: AtomicUsize,
    bytes: AtomicU64,
    stop: AtomicBool,
}

impl Queue<'_> {
    /// Places weights until none are left or a thread has failed.
    fn work(&self, source: &dyn WeightSource, task: Task<'_>) -> Result<()> {
        /// Stops the other threads when dropped, also if this thread panics.
        struct Stop<'a>(&'a AtomicBool);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let stop = Stop(&self.stop);
        while !self.stop.load(Ordering::Relaxed) {
            let Some(mut job) = lock(&self.jobs).next() else {
                // The other threads finish their own weights.
                std::mem::forget(stop);
                return Ok(());
            };
            task.step(self.done.fetch_add(1, Ordering::Relaxed))?;
            let bytes = match self.preparation.step(&job.spec.name) {
                Some(step) => {
                    let made = self.preparation.compute(step, source)?;
                    job.rooms.iter_mut().try_for_each(|(place, room)| {
                        room.fill(|bytes| place.form.fill(place.type_, made.dtype(), made.data(), bytes))
                    })?;
                    0
                }
                None if matches!(task.write, Write::Nothing) => job.look(source)?,
                None => job.place(source)?,
            };
            self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        }
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// [`Floats::copy_to`] on `threads` threads.
pub(super) fn copy_on_all(threads: usize, values: Floats<'_>, type_: Type, out: &mut [u8]) -> Result<()> {
    let part = (out.len() / type_.size()).div_ceil(threads.clamp(1, MAX_WORKERS)).max(1);
    thread::scope(|scope| {
        let parts = values.chunks(part).zip(out.chunks_mut(part * type_.size()));
        let all: Vec<_> =
            parts.map(|(values, out)| scope.spawn(move || values.copy_to(type_, out))).collect();
        all.into_iter()
            .try_for_each(|one| one.join())
            .map_err(|_| Error::internal("panic in a thread that places weights"))
    })
}

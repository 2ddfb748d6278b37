//! Weights and constants on their way into ggml tensors.

use crate::{
    ffi::{Extent, Home, Room, Store, Stored, Target, Tensor, Type, as_floats, product::Words},
    kernels::{Blocks, Panels},
    shape,
    storage::{Floats, float_dtype, into_storage, is_f32, put},
};
use sdrun_abi::{DType, Error, ErrorCode, Flow, Host, Result, Weight, WeightSource, WeightSpec};
use sdrun_graph::Tensor as HostTensor;
use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
};

/// How the elements of an initializer are arranged in its tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Form {
    /// As in the graph.
    Plain,
    /// Row-major matrices packed for our products, `transposed` where they are stored as depth x rows; with blocks, bytes.
    Panels { panels: Panels, transposed: bool, blocks: Option<Blocks> },
    /// A stack of matrices, `[groups, rows, depth]`, in ggml's own blocks; `transposed` as for panels.
    Blocks { matrices: [usize; 3], transposed: bool, blocks: Blocks },
}

impl Form {
    /// Elements of the tensor, of which a word of bf16 pairs has two, for an initializer of `len` elements.
    pub(crate) fn len(self, len: usize) -> usize {
        match self {
            Form::Plain | Form::Blocks { .. } => len,
            Form::Panels { panels, blocks: Some(blocks), .. } => blocks.bytes(&panels),
            Form::Panels { panels, .. } => panels.len() * if panels.words == Words::Bf16 { 2 } else { 1 },
        }
    }

    /// The extent of the tensor for an initializer of this shape.
    pub(crate) fn extent(self, dims: &[usize]) -> Extent {
        match self {
            Form::Plain => shape::extent(dims),
            _ => [self.len(shape::len(dims)), 1, 1, 1],
        }
    }

    /// Fills `out`, the bytes of a tensor of type `type_`, with an initializer of type `dtype` with these bytes.
    ///
    /// # Errors
    /// `Internal` where a form that is arithmetic is asked for values that are not floating-point.
    pub(crate) fn fill(self, type_: Type, dtype: DType, bytes: &[u8], out: &mut [u8]) -> Result<()> {
        match self {
            Form::Plain if is_f32(dtype) => Floats::new(dtype, bytes).copy_to(type_, out),
            Form::Panels { panels, transposed, blocks } => {
                pack((panels, blocks), transposed, floats(dtype, bytes)?, type_, out)?;
            }
            Form::Blocks { matrices, transposed, blocks } => {
                let (values, length) = (floats(dtype, bytes)?, type_.bytes(matrices.iter().product()));
                if out.len() != length {
                    return Err(Error::internal(format!(
                        "{length} bytes for a tensor of {} bytes",
                        out.len()
                    )));
                }
                let read = |start: usize, to: &mut [f32]| values.read(start, to);
                blocks.pack_rows(matrices, transposed, read, |start, line| {
                    out[start..][..line.len()].copy_from_slice(line)
                });
            }
            _ => {
                let arranged = self.arrange(type_, dtype, bytes)?;
                if arranged.len() != out.len() {
                    let (from, to) = (arranged.len(), out.len());
                    return Err(Error::internal(format!("{from} bytes for a ggml tensor of {to} bytes")));
                }
                out.copy_from_slice(&arranged);
            }
        }
        Ok(())
    }

    /// What [`fill`](Self::fill) writes, as bytes of its own.
    pub(crate) fn arrange<'a>(self, type_: Type, dtype: DType, bytes: &'a [u8]) -> Result<Cow<'a, [u8]>> {
        if self == Form::Plain {
            if !matches!(type_, Type::F16 | Type::Bf16) {
                return into_storage(dtype, bytes).map_err(Error::internal);
            }
            let mut out = vec![0; bytes.len() / dtype.size() * type_.size()];
            floats(dtype, bytes)?.copy_to(type_, &mut out);
            return Ok(Cow::Owned(out));
        }
        let mut out = vec![0; type_.bytes(self.len(bytes.len() / dtype.size()))];
        self.fill(type_, dtype, bytes, &mut out)?;
        Ok(Cow::Owned(out))
    }
}

fn floats(dtype: DType, bytes: &[u8]) -> Result<Floats<'_>> {
    match is_f32(dtype) {
        true => Ok(Floats::new(dtype, bytes)),
        false => Err(Error::internal(format!("a {dtype} initializer was taken for a matrix"))),
    }
}

/// Writes panels into the bytes of a tensor of type `type_`.
fn pack(
    (panels, blocks): (Panels, Option<Blocks>),
    transposed: bool,
    values: Floats<'_>,
    type_: Type,
    out: &mut [u8],
) -> Result<()> {
    // Pairs of bf16 and f32 are words of 32 bits as they are.
    let type_ = if panels.words == Words::F32 { type_ } else { Type::F32 };
    let size = type_.size();
    let from = blocks.map_or(panels.len() * size, |blocks| blocks.bytes(&panels));
    if out.len() != from {
        return Err(Error::internal(format!("{from} bytes for a ggml tensor of {} bytes", out.len())));
    }
    let read = |start: usize, to: &mut [f32]| values.read(start, to);
    if let Some(blocks) = blocks {
        blocks.pack(&panels, transposed, read, |start, bytes| {
            out[start..][..bytes.len()].copy_from_slice(bytes)
        });
        return Ok(());
    }
    panels.pack(transposed, read, |start, words| {
        put(as_floats(words), type_, &mut out[start * size..][..words.len() * size])
    });
    Ok(())
}

/// A tensor that holds a constant of the graph.
#[derive(Clone, Debug)]
pub(crate) struct Constant {
    pub(crate) tensor: Tensor,
    pub(crate) value: HostTensor,
    pub(crate) form: Form,
    /// Type of the tensor.
    pub(crate) type_: Type,
}

/// The weights of a session: which there are, and the tensors that hold them in each form some graph reads.
pub(crate) struct Bank {
    store: Store,
    specs: BTreeMap<String, WeightSpec>,
    places: Vec<Place>,
    /// Places that hold their weight.
    filled: usize,
    /// Weights that a refit which ended in the middle may have overwritten or not.
    torn: BTreeSet<String>,
    known: HashMap<(String, Form, Type, Home), Stored>,
}

/// A weight in one form.
struct Place {
    weight: String,
    form: Form,
    type_: Type,
}

/// Threads that place weights. Each holds one weight.
const MAX_WORKERS: usize = 8;
/// Below this many bytes starting threads takes longer than they save.
const WORTH_THREADS: usize = 4 << 20;

impl Bank {
    /// For an engine with these weights. Nothing has memory before [`load`](Self::load).
    pub(crate) fn new(target: Target, weights: &[WeightSpec]) -> Self {
        let specs = weights.iter().map(|spec| (spec.name.clone(), spec.clone())).collect();
        Bank {
            store: Store::new(target),
            specs,
            places: Vec::new(),
            filled: 0,
            torn: BTreeSet::new(),
            known: HashMap::new(),
        }
    }

    /// The tensor that holds a weight in this form, in an element type.
    pub(crate) fn place(&mut self, weight: &str, form: Form, type_: Type, home: Home) -> Result<Stored> {
        let key = (weight.to_string(), form, type_, home);
        if let Some(stored) = self.known.get(&key) {
            return Ok(*stored);
        }
        let spec = self.spec(weight)?;
        let stored = self.store.add(type_, form.extent(&spec.shape), home)?;
        self.places.push(Place { weight: key.0.clone(), form, type_ });
        self.known.insert(key, stored);
        Ok(stored)
    }

    /// The memory of the weights.
    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// Allocates the tensors and fills them on `threads` threads.
    pub(crate) fn load(&mut self, source: &dyn WeightSource, host: &dyn Host, threads: usize) -> Result<()> {
        self.store.allocate()?;
        let all: BTreeSet<String> = self.specs.keys().cloned().collect();
        self.pull(&all, source, Task { phase: "weights", threads, host: Some(host), write: true })?;
        self.filled = self.places.len();
        Ok(())
    }

    /// Fills the places that were added since the weights were loaded, from those that are filled.
    ///
    /// # Errors
    /// `FailedPrecondition` where no form that is there tells all of the weight. The places are then forgotten.
    pub(crate) fn derive(&mut self) -> Result<()> {
        if self.filled == self.places.len() {
            return Ok(());
        }
        let result = self.store.allocate().and_then(|()| self.derive_into());
        if result.is_err() {
            let lost = &mut self.places[self.filled..];
            lost.iter_mut().for_each(|place| place.weight.clear());
            self.known.retain(|_, stored| stored.index() < self.filled);
        }
        self.filled = self.places.len();
        result
    }

    fn derive_into(&mut self) -> Result<()> {
        let (filled, added) = self.places.split_at(self.filled);
        let mut rooms = self.store.rooms()?;
        for (place, at) in added.iter().zip(self.filled..) {
            let tells = |other: &Place| {
                other.weight == place.weight
                    && other.form == Form::Plain
                    && (other.type_ == place.type_ || other.type_ == Type::F32)
            };
            let source = filled.iter().zip(&rooms).find(|(other, _)| tells(other));
            let Some((type_, plain)) = source.map(|(other, room)| (other.type_, room.copy())) else {
                let message = format!(
                    "weight {:?} is not kept in the form that inputs of this shape need",
                    place.weight
                );
                return Err(Error::precondition(message)
                    .with_hint("build an engine for this shape, with no dimension left open"));
            };
            rooms[at].fill(|bytes| place.form.fill(place.type_, float_dtype(type_), &plain, bytes))?;
        }
        Ok(())
    }

    /// Overwrites the weights named in `changed`; returns the bytes the source delivered.
    ///
    /// The source is asked for all of them first, and nothing is kept of what it delivers: whatever is wrong with them is
    /// found while the weights from before are still there, and no memory is needed for a second set.
    pub(crate) fn replace(
        &mut self,
        changed: &[&str],
        source: &dyn WeightSource,
        host: &dyn Host,
        threads: usize,
    ) -> Result<u64> {
        let names: BTreeSet<String> = changed.iter().map(|name| name.to_string()).collect();
        self.pull(&names, source, Task { phase: "refit", threads, host: Some(host), write: false })?;
        let result = self.pull(&names, source, Task { phase: "refit", threads, host: None, write: true });
        match result {
            Ok(_) => self.torn.retain(|name| !names.contains(name)),
            Err(_) => self.torn.extend(names),
        }
        result
    }

    /// An error where the weights are not those of one set.
    pub(crate) fn whole(&self) -> Result<()> {
        let Some(name) = self.torn.first() else { return Ok(()) };
        let (count, message) =
            (self.torn.len(), "the last refit ended in the middle, as the source of the weights failed");
        Err(Error::precondition(format!(
            "{message} the second time it was asked: {count} weights, of them {name:?}, may be old or new"
        ))
        .with_hint("refit these weights again, or load the engine again"))
    }

    fn spec(&self, weight: &str) -> Result<&WeightSpec> {
        self.specs.get(weight).ok_or_else(|| Error::not_found(format!("the engine has no weight {weight:?}")))
    }

    fn pull(&mut self, names: &BTreeSet<String>, source: &dyn WeightSource, task: Task<'_>) -> Result<u64> {
        for name in names {
            self.spec(name)?;
        }
        let Bank { store, specs, places, .. } = self;
        let mut jobs: BTreeMap<&str, Job<'_>> = BTreeMap::new();
        for (name, spec) in specs.iter().filter(|(name, _)| names.contains(*name)) {
            jobs.insert(name, Job { spec, rooms: Vec::new() });
        }
        for (place, room) in places.iter().zip(store.rooms()?) {
            if let Some(job) = jobs.get_mut(&*place.weight) {
                job.rooms.push((place, room));
            }
        }
        // The largest first, so that no thread is left alone with one at the end.
        let mut jobs: Vec<Job<'_>> = jobs.into_values().collect();
        jobs.sort_by_key(|job| std::cmp::Reverse(job.bytes()));
        let worth = jobs.iter().map(Job::bytes).sum::<usize>() >= WORTH_THREADS;
        let workers = if worth { task.threads.clamp(1, MAX_WORKERS) } else { 1 };
        let queue = Queue {
            total: jobs.len() as u64,
            jobs: Mutex::new(jobs.into_iter()),
            done: AtomicUsize::new(0),
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

/// What is done with weights.
#[derive(Clone, Copy)]
struct Task<'a> {
    phase: &'a str,
    threads: usize,
    /// Is told of the progress and may cancel.
    host: Option<&'a dyn Host>,
    /// Whether they are written to their tensors or only looked at.
    write: bool,
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
}

struct Queue<'a> {
    jobs: Mutex<std::vec::IntoIter<Job<'a>>>,
    total: u64,
    done: AtomicUsize,
    bytes: AtomicU64,
    stop: AtomicBool,
}

impl Queue<'_> {
    /// Takes weights until there are none, or until somebody failed.
    fn work(&self, source: &dyn WeightSource, task: Task<'_>) -> Result<()> {
        /// Also stops the others when this thread panics.
        struct Stop<'a>(&'a AtomicBool);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let stop = Stop(&self.stop);
        while !self.stop.load(Ordering::Relaxed) {
            let Some(mut job) = lock(&self.jobs).next() else {
                // The others finish theirs.
                std::mem::forget(stop);
                return Ok(());
            };
            let step = self.done.fetch_add(1, Ordering::Relaxed) as u64;
            if task.host.is_some_and(|host| host.progress(task.phase, step, self.total) == Flow::Cancel) {
                let message = format!("placing the weights was cancelled ({})", task.phase);
                return Err(Error::new(ErrorCode::Cancelled, message));
            }
            let weight = pull(source, job.spec)?;
            for (place, room) in job.rooms.iter_mut().filter(|_| task.write) {
                room.fill(|bytes| place.form.fill(place.type_, weight.dtype, weight.data(), bytes))?;
            }
            self.bytes.fetch_add(weight.data().len() as u64, Ordering::Relaxed);
        }
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A weight of the type and shape the graph states.
fn pull<'a>(source: &'a dyn WeightSource, spec: &WeightSpec) -> Result<Weight<'a>> {
    let weight = source.get(&spec.name)?;
    if weight.dtype != spec.dtype || weight.shape != spec.shape {
        return Err(Error::invalid(format!(
            "weight {:?} is {} {:?}, the graph has {} {:?}",
            spec.name, weight.dtype, weight.shape, spec.dtype, spec.shape
        )));
    }
    Ok(weight)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::to_bytes;

    #[test]
    fn filling_is_arranging() {
        let values: Vec<f32> = (0..3 * 40 * 70).map(|i| (i % 251) as f32 - 125.0).collect();
        let panels = Panels::columns([3, 40, 70], 16);
        let forms = [
            Form::Plain,
            Form::Panels { panels, transposed: false, blocks: None },
            Form::Panels { panels, transposed: true, blocks: None },
        ];
        for (dtype, bytes) in [
            (DType::F32, to_bytes(&values, Type::F32)),
            (DType::F16, to_bytes(&values, Type::F16)),
            (DType::BF16, to_bytes(&values, Type::Bf16)),
        ] {
            for type_ in [Type::F32, Type::F16, Type::Bf16] {
                for form in forms {
                    let mut out = vec![0xaa; form.len(values.len()) * type_.size()];
                    form.fill(type_, dtype, &bytes, &mut out).unwrap();
                    let arranged = form.arrange(type_, dtype, &bytes).unwrap();
                    assert_eq!(out[..], arranged[..], "{form:?} {dtype} {type_:?}");
                }
            }
        }
    }
}

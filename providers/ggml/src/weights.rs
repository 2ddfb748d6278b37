//! Weights and constants on their way into ggml tensors.

use crate::{
    ffi::{Home, Room, Store, Stored, Target, Tensor, Type},
    form::{Form, check_blocks},
    kernels::Encoding,
    shape,
    storage::{Floats, float_dtype, from_storage, is_f32, storage_type},
    topology::explain,
};
use sdrun_abi::{
    DType, EncodedWeight, Error, ErrorCode, Flow, Host, Result, TRANSPOSED, Weight, WeightSource, WeightSpec,
};
use sdrun_graph::Tensor as HostTensor;
use sdrun_provider_common::Preparation;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
};

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
    /// Of the engine's weights, and of what is prepared from them.
    specs: BTreeMap<String, WeightSpec>,
    preparation: Arc<Preparation>,
    places: Vec<Place>,
    /// Weights that a refit which ended in the middle may have overwritten or not.
    torn: BTreeSet<String>,
    known: HashMap<(String, Form, Type, Home), Stored>,
}

/// A weight in one form.
struct Place {
    weight: String,
    form: Form,
    type_: Type,
    stored: Stored,
    home: Home,
    /// Whether it holds its weight.
    filled: bool,
}

/// Threads that place weights. Each holds one weight.
const MAX_WORKERS: usize = 8;
/// Below this many bytes starting threads takes longer than they save.
const WORTH_THREADS: usize = 4 << 20;
/// From this many bytes a weight that lies in main memory as in the graph is a table with memory of its own.
const TABLE: usize = 1 << 20;

impl Bank {
    /// For an engine with these weights, whose graph reads the outputs of `preparation` in place of some. Nothing has memory
    /// before [`load`](Self::load).
    pub(crate) fn new(target: Target, weights: &[WeightSpec], preparation: Arc<Preparation>) -> Self {
        let made = preparation.outputs();
        let specs = weights.iter().cloned().chain(made).map(|spec| (spec.name.clone(), spec)).collect();
        Bank {
            store: Store::new(target),
            specs,
            preparation,
            places: Vec::new(),
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
        self.places.push(Place { weight: key.0.clone(), form, type_, stored, home, filled: false });
        self.known.insert(key, stored);
        Ok(stored)
    }

    /// Keeps a weight as it is in the graph, so that any form can be made of it.
    pub(crate) fn place_plain(&mut self, weight: &str, dtype: DType) -> Result<()> {
        let type_ = storage_type(dtype).ok_or_else(|| {
            Error::unsupported(format!("weight {weight:?} is {dtype}, which ggml cannot hold"))
        })?;
        self.place(weight, Form::Plain, type_, Home::Host).map(drop)
    }

    /// The memory of the weights.
    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// Gives the tensors memory and fills them on `threads` threads.
    pub(crate) fn load(&mut self, source: &dyn WeightSource, host: &dyn Host, threads: usize) -> Result<()> {
        let due = self.due(|_| true);
        let total = due.len();
        let task =
            Task { phase: "weights", threads, host: Some(host), write: Write::Missing, total, before: 0 };
        self.load_tables(source, task)?;
        self.store.allocate()?;
        let with = |filled| {
            let places = self.places.iter().filter(move |place| place.filled == filled);
            places.map(|place| &place.weight).collect::<BTreeSet<_>>()
        };
        let (tables, others) = (with(true), with(false));
        let rest = due.into_iter().filter(|name| !tables.contains(name) || others.contains(name));
        let rest: BTreeSet<String> = rest.collect();
        self.pull(&rest, source, Task { before: total - rest.len(), ..task })?;
        self.places.iter_mut().for_each(|place| place.filled = true);
        Ok(())
    }

    /// Places large weights that are not rearranged, of which rows are looked up: an embedding may be half of a model. Where
    /// the file has the elements as the tensor does they stay there, and the rows that are read come into memory; else all
    /// threads write one table after the other, before other weights have memory, so that what a table is converted from
    /// adds nothing to the session's peak.
    fn load_tables(&mut self, source: &dyn WeightSource, task: Task<'_>) -> Result<()> {
        let Bank { store, specs, preparation, places, .. } = self;
        let mut done = 0;
        for place in places.iter_mut().filter(|place| preparation.step(&place.weight).is_none()) {
            let Some(spec) = specs.get(&place.weight) else { continue };
            let elements = shape::len(&spec.shape);
            let plain = place.form == Form::Plain && place.home == Home::Host && is_f32(spec.dtype);
            if !plain || elements * place.type_.size() < TABLE {
                continue;
            }
            task.step(done)?;
            let weight = pull(source, spec)?;
            let file = weight.file.as_ref().filter(|_| spec.dtype == float_dtype(place.type_));
            let stays = match file {
                Some((path, offset)) => store.map(place.stored, (path, *offset), weight.data())?,
                None => false,
            };
            if !stays {
                let mut room = store.allocate_alone(place.stored)?;
                room.fill(|out| {
                    copy_on_all(task.threads, Floats::new(weight.dtype, weight.data()), place.type_, out)
                })?;
            }
            place.filled = true;
            done += 1;
        }
        Ok(())
    }

    /// Fills the places that were added since the weights were loaded, from those that are filled.
    ///
    /// # Errors
    /// `FailedPrecondition` where no form that is there tells all of the weight. The places are then forgotten.
    pub(crate) fn derive(&mut self) -> Result<()> {
        let old = self.places.partition_point(|place| place.filled);
        if old == self.places.len() {
            return Ok(());
        }
        let result = self.store.allocate().and_then(|()| self.derive_into(old));
        let added = &mut self.places[old..];
        added.iter_mut().for_each(|place| place.filled = true);
        if result.is_err() {
            added.iter_mut().for_each(|place| place.weight.clear());
            self.known.retain(|_, stored| stored.index() < old);
        }
        result
    }

    /// Fills the places after the first `old`.
    fn derive_into(&mut self, old: usize) -> Result<()> {
        let (filled, added) = self.places.split_at(old);
        let mut rooms = self.store.rooms()?;
        for (place, at) in added.iter().zip(old..) {
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
            let dtype = self.specs.get(&place.weight).map(|spec| spec.dtype).filter(|dtype| !is_f32(*dtype));
            let dtype = dtype.unwrap_or(float_dtype(type_));
            rooms[at].fill(|bytes| place.form.fill(place.type_, dtype, &plain, bytes))?;
        }
        Ok(())
    }

    /// A copy of a weight that was placed with [`place_plain`](Self::place_plain).
    pub(crate) fn plain(&mut self, weight: &str) -> Result<HostTensor> {
        let spec = self.spec(weight)?.clone();
        let is_plain = |place: &Place| {
            place.filled && place.weight == weight && place.form == Form::Plain && place.home == Home::Host
        };
        let Some(at) = self.places.iter().position(is_plain) else {
            return Err(Error::internal(format!("weight {weight:?} is not kept as it is in the graph")));
        };
        let bytes = self.store.rooms()?[at].copy();
        let bytes = from_storage(spec.dtype, self.places[at].type_, &bytes).map_err(Error::internal)?;
        HostTensor::new(spec.dtype, spec.shape, bytes).map_err(explain)
    }

    /// The names to write when the weights change for which `changed` returns true: those weights, and what is prepared from
    /// them. A weight that only the preparation reads has no place of its own.
    fn due(&self, changed: impl Fn(&str) -> bool) -> BTreeSet<String> {
        let placed: BTreeSet<&str> = self.places.iter().map(|place| &*place.weight).collect();
        let read: BTreeSet<&str> = self.preparation.weights().map(|spec| &*spec.name).collect();
        let own = |name: &&String| {
            self.preparation.step(name).is_none()
                && changed(name)
                && (placed.contains(&***name) || !read.contains(&***name))
        };
        let made = self.preparation.steps(&changed).map(|step| self.preparation.name(step).to_string());
        self.specs.keys().filter(own).cloned().chain(made).collect()
    }

    /// Overwrites the weights named in `changed` and what is prepared out of them; returns the bytes the source delivered for the former.
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
        let steps = self.preparation.steps(|name| names.contains(name));
        let read: BTreeSet<String> = steps.flat_map(|step| &step.weights).chain(&names).cloned().collect();
        let looks = Task {
            phase: "refit",
            threads,
            host: Some(host),
            write: Write::Nothing,
            total: read.len(),
            before: 0,
        };
        let bytes = self.pull(&names, source, looks)?;
        let others = read.difference(&names).cloned().collect();
        self.pull(&others, source, Task { before: names.len(), ..looks })?;
        let due = self.due(|name| names.contains(name));
        let result = self.pull(&due, source, Task { host: None, write: Write::All, ..looks });
        match result {
            Ok(_) => self.torn.retain(|name| !names.contains(name)),
            Err(_) => self.torn.extend(names.iter().cloned()),
        }
        result.map(|_| bytes)
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
        // The largest first, so that no thread is left alone with one at the end.
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

/// What is done with weights.
#[derive(Clone, Copy)]
struct Task<'a> {
    phase: &'a str,
    threads: usize,
    /// Is told of the progress and may cancel.
    host: Option<&'a dyn Host>,
    write: Write,
    /// Weights there are, and how many of them were placed before.
    total: usize,
    before: usize,
}

/// Which tensors a weight is written to.
#[derive(Clone, Copy)]
enum Write {
    /// None: the source is only asked whether it has it.
    Nothing,
    /// Those that do not hold it yet.
    Missing,
    All,
}

impl Task<'_> {
    /// Tells how many weights were placed.
    fn step(&self, done: usize) -> Result<()> {
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
}

impl Job<'_> {
    /// Asks for the weight, in the blocks that a tensor takes as they are where the source has them, and writes it where
    /// `writes` says so. Returns the bytes the source delivered.
    fn place(&mut self, source: &dyn WeightSource, writes: bool) -> Result<usize> {
        let Job { spec, rooms } = self;
        let (mut plain, mut bytes) = (None, 0);
        if rooms.is_empty() {
            bytes += pull(source, spec)?.data().len();
        }
        for (place, room) in rooms {
            if let Some((encoding, weight)) = pull_encoded(source, spec, place.form)? {
                bytes += weight.data().len();
                if writes {
                    room.fill(|out| place.form.fill_encoded(encoding, weight.data(), out))?;
                }
                continue;
            }
            let weight: &Weight<'_> = match &plain {
                Some(weight) => weight,
                None => {
                    let weight = plain.insert(pull(source, spec)?);
                    bytes += weight.data().len();
                    weight
                }
            };
            if writes {
                room.fill(|out| place.form.fill(place.type_, weight.dtype, weight.data(), out))?;
            }
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
            task.step(self.done.fetch_add(1, Ordering::Relaxed))?;
            let bytes = match self.preparation.step(&job.spec.name) {
                Some(step) => {
                    let made = self.preparation.compute(step, source)?;
                    job.rooms.iter_mut().try_for_each(|(place, room)| {
                        room.fill(|bytes| place.form.fill(place.type_, made.dtype(), made.data(), bytes))
                    })?;
                    0
                }
                None => job.place(source, !matches!(task.write, Write::Nothing))?,
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
fn copy_on_all(threads: usize, values: Floats<'_>, type_: Type, out: &mut [u8]) -> Result<()> {
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

/// A weight in blocks that a tensor of this form takes as they are, where the source has it in such.
fn pull_encoded<'a>(
    source: &'a dyn WeightSource,
    spec: &WeightSpec,
    form: Form,
) -> Result<Option<(Encoding, EncodedWeight<'a>)>> {
    let (transposed, encodings) = form.encodings(&spec.shape);
    let suffix = if transposed { TRANSPOSED } else { "" };
    let wanted: Vec<(Encoding, String)> = encodings.map(|e| (e, format!("{}{suffix}", e.name()))).collect();
    if wanted.is_empty() {
        return Ok(None);
    }
    let names: Vec<&str> = wanted.iter().map(|(_, name)| name.as_str()).collect();
    let Some(weight) = source.encoded(&spec.name, &names)? else { return Ok(None) };
    let encoding = wanted.iter().find(|(_, name)| *name == weight.encoding).map(|(encoding, _)| *encoding);
    let Some(encoding) = encoding.filter(|_| weight.shape == spec.shape) else {
        return Err(Error::invalid(format!(
            "weight {:?} came as {} {:?}, the graph has {:?} and takes {}",
            spec.name,
            weight.encoding,
            weight.shape,
            spec.shape,
            names.join(", ")
        )));
    };
    check_blocks(encoding, weight.data(), shape::len(&spec.shape))
        .map_err(|error| Error { message: format!("weight {:?}: {}", spec.name, error.message), ..error })?;
    Ok(Some((encoding, weight)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{storage::to_bytes, tests::cpu};
    use sdrun_abi::NoHost;
    use std::path::PathBuf;

    /// A table of f32, and where it is said to lie.
    struct Table {
        values: Vec<f32>,
        file: Option<(PathBuf, u64)>,
    }

    impl Table {
        const ROWS: usize = 1 << 13;
        const SHAPE: [usize; 2] = [Self::ROWS, 80];

        fn new(first: f32) -> Self {
            Table { values: (0..Self::ROWS * 80).map(|i| first + i as f32).collect(), file: None }
        }

        /// In a file, `skip` bytes after its start.
        fn in_file(mut self, path: PathBuf, skip: usize) -> Self {
            let bytes = [vec![0; skip], to_bytes(&self.values, Type::F32)].concat();
            std::fs::write(&path, bytes).unwrap();
            self.file = Some((path, skip as u64));
            self
        }

        fn bank(type_: Type) -> Bank {
            let spec = WeightSpec { name: "w".into(), dtype: DType::F32, shape: Self::SHAPE.into() };
            let mut bank = Bank::new(cpu(), &[spec], Arc::default());
            bank.place("w", Form::Plain, type_, Home::Host).unwrap();
            bank
        }
    }

    impl WeightSource for Table {
        fn get(&self, _: &str) -> Result<Weight<'_>> {
            let weight = Weight::new(DType::F32, Self::SHAPE.into(), to_bytes(&self.values, Type::F32))?;
            Ok(match self.file.clone() {
                Some((path, offset)) => weight.in_file(path, offset),
                None => weight,
            })
        }
    }

    fn contents(bank: &mut Bank) -> Vec<u8> {
        bank.store.rooms().unwrap()[0].copy()
    }

    #[test]
    fn tables_stay_in_their_file_and_a_refit_does_not_change_it() {
        let folder = tempfile::tempdir().unwrap();
        // At the start of a page, inside one, and after the first 64 KB.
        for skip in [0, 4, 70_000] {
            let path = folder.path().join("w.bin");
            let table = Table::new(1.0).in_file(path.clone(), skip);
            let mut bank = Table::bank(Type::F32);
            bank.load(&table, &NoHost, 2).unwrap();
            assert!(bank.store.mapped_bytes() >= (table.values.len() * 4) as u64);
            assert_eq!(contents(&mut bank), to_bytes(&table.values, Type::F32));

            let (before, other) = (std::fs::read(&path).unwrap(), Table::new(0.5));
            bank.replace(&["w"], &other, &NoHost, 2).unwrap();
            assert_eq!(contents(&mut bank), to_bytes(&other.values, Type::F32));
            assert_eq!(std::fs::read(&path).unwrap(), before);

            // Weights outlive the name of their file.
            let mut bank = Table::bank(Type::F32);
            bank.load(&table, &NoHost, 2).unwrap();
            std::fs::remove_file(&path).unwrap();
            assert_eq!(contents(&mut bank), to_bytes(&table.values, Type::F32));
        }
    }

    #[test]
    fn tables_that_cannot_stay_in_a_file_are_copied() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let is = |what: &str, table: Table, type_: Type| {
            let mut bank = Table::bank(type_);
            bank.load(&table, &NoHost, 3).unwrap();
            assert_eq!(bank.store.mapped_bytes(), 0, "{what}");
            assert!(contents(&mut bank) == to_bytes(&table.values, type_), "{what}");
        };
        is("in memory", Table::new(1.0), Type::F32);
        is("of another type", Table::new(1.0).in_file(at("type"), 0), Type::Bf16);
        is("at an odd address", Table::new(1.0).in_file(at("odd"), 3), Type::F32);
        let moved = |file| Table { file: Some(file), ..Table::new(1.0) };
        is("in a file that is gone", moved((at("none"), 0)), Type::F32);
        is("in a folder", moved((folder.path().into(), 0)), Type::F32);
        drop(Table::new(1.0).in_file(at("short"), 0));
        is("in a file that is too short", moved((at("short"), 4)), Type::F32);
        is("beyond all files", moved((at("short"), u64::MAX - 3)), Type::F32);
        drop(Table::new(2.0).in_file(at("other"), 0));
        is("in another's file", moved((at("other"), 0)), Type::F32);
    }
}

//! Stores weights and constants in ggml tensors.

mod fill;
mod source;
#[cfg(test)]
mod tests;

use crate::{
    ffi::{Home, Store, Stored, Target, Tensor, Type},
    form::Form,
    shape,
    storage::{Floats, float_dtype, from_storage, is_f32, storage_type},
    topology::explain,
};
use fill::{Task, Write, copy_on_all};
use sdrun_abi::{DType, Error, Host, Result, WeightSource, WeightSpec};
use sdrun_graph::Tensor as HostTensor;
use sdrun_provider_common::{Preparation, weight};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
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

/// The weights of a session, and the tensors that hold them in every form that a graph reads.
pub(crate) struct Bank {
    store: Store,
    /// Specs of the engine's weights and of the tensors prepared from them.
    specs: BTreeMap<String, WeightSpec>,
    preparation: Arc<Preparation>,
    places: Vec<Place>,
    /// Weights that may be old or new because a refit failed halfway.
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
    /// Whether the tensor contains the weight.
    filled: bool,
}

/// A weight in the graph's layout in main memory is a table, with its own allocation, from this many bytes.
const TABLE: usize = 1 << 20;

impl Bank {
    /// Creates the bank for an engine with these weights. The outputs of `preparation` replace some of them in its
    /// graph. No memory is allocated before [`load`](Self::load).
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

    /// The tensor that holds a weight in this form and element type.
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

    /// Keeps a weight in the graph's layout, from which any other form can be made.
    pub(crate) fn place_plain(&mut self, weight: &str, dtype: DType) -> Result<()> {
        let type_ = storage_type(dtype).ok_or_else(|| {
            Error::unsupported(format!("weight {weight:?} is {dtype}, which ggml cannot hold"))
        })?;
        self.place(weight, Form::Plain, type_, Home::Host).map(drop)
    }

    /// The memory for the weights, without the bank.
    pub(crate) fn into_store(self) -> Store {
        self.store
    }

    /// The memory that holds the weights.
    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// Allocates the tensors and fills them on `threads` threads.
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

    /// Places large tables, such as embeddings. They keep the graph's layout, and a run reads only some of their rows.
    /// An embedding may be half of a model. If the file stores the elements in the tensor's type, the table stays in
    /// the file, and only the rows that are read come into memory. Otherwise all threads convert one table after
    /// another. This happens before other weights are allocated, so that the sources of the conversion do not add to
    /// the session's peak memory.
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
            let weight = weight(source, spec)?;
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

    /// Fills the places added since the weights were loaded, from places that are already filled.
    ///
    /// # Errors
    /// `FailedPrecondition` if no existing form contains the whole weight. The new places are then discarded.
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

    /// Fills the places from index `old` on.
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
                    "weight {:?} is not stored in the form that inputs of this shape need",
                    place.weight
                );
                return Err(Error::precondition(message)
                    .with_hint("build an engine for exactly this shape, without open dimensions"));
            };
            let dtype = self.specs.get(&place.weight).map(|spec| spec.dtype).filter(|dtype| !is_f32(*dtype));
            let dtype = dtype.unwrap_or(float_dtype(type_));
            rooms[at].fill(|bytes| place.form.fill(place.type_, dtype, &plain, bytes))?;
        }
        Ok(())
    }

    /// Copies a weight that was placed with [`place_plain`](Self::place_plain).
    pub(crate) fn plain(&mut self, weight: &str) -> Result<HostTensor> {
        let spec = self.spec(weight)?.clone();
        let is_plain = |place: &Place| {
            place.filled && place.weight == weight && place.form == Form::Plain && place.home == Home::Host
        };
        let Some(at) = self.places.iter().position(is_plain) else {
            return Err(Error::internal(format!("weight {weight:?} is not stored in the graph's layout")));
        };
        let bytes = self.store.rooms()?[at].copy();
        let bytes = from_storage(spec.dtype, self.places[at].type_, &bytes).map_err(Error::internal)?;
        HostTensor::new(spec.dtype, spec.shape, bytes).map_err(explain)
    }

    /// The names to write when the weights change for which `changed` returns true: these weights and the tensors
    /// prepared from them. A weight that only the preparation reads is not stored itself.
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

    /// Overwrites the weights in `changed` and the tensors prepared from them. Returns the number of bytes that the
    /// source delivered for the former.
    ///
    /// First checks that the source can deliver all of them. This finds errors while the old weights are still intact,
    /// and needs no memory for a second set.
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

    /// Fails if the weights are a mix of an old and a new set.
    pub(crate) fn whole(&self) -> Result<()> {
        let Some(name) = self.torn.first() else { return Ok(()) };
        let count = self.torn.len();
        Err(Error::precondition(format!(
            "{count} weights, among them {name:?}, may be old or new, because the weight source failed halfway \
             through the last refit"
        ))
        .with_hint("refit these weights again, or load the engine again"))
    }

    fn spec(&self, weight: &str) -> Result<&WeightSpec> {
        self.specs.get(weight).ok_or_else(|| Error::not_found(format!("the engine has no weight {weight:?}")))
    }
}

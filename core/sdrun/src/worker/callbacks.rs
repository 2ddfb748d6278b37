//! The host traits that the plugin in a worker calls; they send requests over the pipe.

use super::{
    pipe::{Pipe, lock},
    protocol::{Bytes, FromWorker, Placed, ToWorker},
    shm::Region,
};
use sdrun_abi::{
    EncodedWeight, Error, Flow, Host, LogLevel, OutputSink, OutputSpec, Result, Weight, WeightSource,
};
use sdrun_files::{Links, Map, open_regular};
use std::{
    collections::{HashMap, hash_map::Entry},
    fs::File,
    ops::Deref,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

/// Maximum length of a forwarded log line, in bytes.
const LOG_LINE: usize = 16 << 10;

fn confused() -> Error {
    Error::internal("the host's answer does not match the request")
}

pub(super) struct HostOf<'p>(pub(super) &'p Pipe);

impl Host for HostOf<'_> {
    fn log(&self, level: LogLevel, target: &str, message: &str) {
        let cut = message.floor_char_boundary(LOG_LINE);
        let message =
            if cut < message.len() { format!("{}…", &message[..cut]) } else { message.to_string() };
        self.0.send(&FromWorker::Log { level, target: target.into(), message });
    }
    fn progress(&self, phase: &str, step: u64, total: u64) -> Flow {
        match self.0.ask(&FromWorker::Progress { phase: phase.into(), step, total }) {
            ToWorker::Flow { cancel: false } if !self.cancelled() => Flow::Continue,
            _ => Flow::Cancel,
        }
    }
    fn cancelled(&self) -> bool {
        self.0.is_cancelled()
    }
}

/// The weights for one call.
pub(super) struct Weights<'p> {
    pipe: &'p Pipe,
    mapped: Mutex<Mapped>,
    /// Slots whose weight is no longer in use.
    released: Mutex<Vec<usize>>,
}

#[derive(Default)]
struct Mapped {
    files: HashMap<PathBuf, Arc<File>>,
    slots: HashMap<usize, Arc<Region>>,
}

impl<'p> Weights<'p> {
    pub(super) fn new(pipe: &'p Pipe) -> Self {
        Weights { pipe, mapped: Mutex::default(), released: Mutex::default() }
    }

    /// Maps only these bytes, and only while they are in use. Otherwise, bytes that a provider has copied would count
    /// as memory twice.
    fn in_file(&self, path: &Path, offset: u64, len: usize) -> Result<Map> {
        let failed = |e| Error::io("map the weights in", path, &e);
        let file = match lock(&self.mapped).files.entry(path.to_path_buf()) {
            Entry::Occupied(known) => known.get().clone(),
            Entry::Vacant(new) => new.insert(Arc::new(open_regular(path, Links::Follow)?)).clone(),
        };
        let size = file.metadata().map_err(failed)?.len();
        if offset.checked_add(len as u64).is_none_or(|end| end > size) {
            return Err(Error::new(
                sdrun_abi::ErrorCode::DataLoss,
                format!(
                    "{} has {size} bytes; a weight of {len} bytes at {offset} does not lie in it",
                    path.display()
                ),
            )
            .with_file(path));
        }
        Map::of_part(&file, offset, len).map_err(failed)
    }

    /// The bytes of an answer, and the file that holds them.
    fn bytes(&self, bytes: Bytes, len: usize) -> Result<(Data<'_>, Option<(PathBuf, u64)>)> {
        let reference = match bytes {
            Bytes::File { path, offset } => {
                let map = self.in_file(&path, offset, len)?;
                return Ok((Data::Mapped(map), Some((path, offset))));
            }
            Bytes::Region(reference) if reference.len == len => reference,
            Bytes::Region(_) => return Err(confused()),
        };
        let slot = reference.slot;
        let mut mapped = lock(&self.mapped);
        if let Some(file) = &reference.file {
            mapped.slots.insert(slot, Arc::new(Region::attach(file, len)?));
        }
        let region = mapped.slots.get(&slot).filter(|r| r.capacity() >= len).ok_or_else(confused)?;
        Ok((Data::Lent(Lent { region: region.clone(), len, slot, released: &self.released }), None))
    }
}

/// The bytes of a weight, wherever they are stored.
enum Data<'w> {
    Mapped(Map),
    Lent(Lent<'w>),
}

impl Deref for Data<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Data::Mapped(map) => map,
            Data::Lent(lent) => lent,
        }
    }
}

/// A weight in a region. Dropping it lets the host reuse the region.
struct Lent<'w> {
    region: Arc<Region>,
    len: usize,
    slot: usize,
    released: &'w Mutex<Vec<usize>>,
}

impl Deref for Lent<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.region.bytes()[..self.len]
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        lock(self.released).push(self.slot);
    }
}

impl WeightSource for Weights<'_> {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        let released = std::mem::take(&mut *lock(&self.released));
        let question = FromWorker::NeedWeight { name: name.into(), released };
        let (dtype, shape, bytes) = match self.pipe.ask(&question) {
            ToWorker::Weight { dtype, shape, bytes } => (dtype, shape, bytes),
            ToWorker::Refused(error) => return Err(error),
            _ => return Err(confused()),
        };
        let len = dtype
            .bytes_of(&shape)
            .ok_or_else(|| Error::invalid(format!("a weight of shape {shape:?} is too large")))?;
        let (data, file) = self.bytes(bytes, len)?;
        let mut weight = Weight::new(dtype, shape, data)?;
        weight.file = file;
        Ok(weight)
    }

    fn check(&self, name: &str) -> Result<()> {
        match self.pipe.ask(&FromWorker::NeedCheck { name: name.into() }) {
            ToWorker::Checked => Ok(()),
            ToWorker::Refused(error) => Err(error),
            _ => Err(confused()),
        }
    }

    fn encoded(&self, name: &str, encodings: &[&str]) -> Result<Option<EncodedWeight<'_>>> {
        let released = std::mem::take(&mut *lock(&self.released));
        let encodings = encodings.iter().map(|e| e.to_string()).collect();
        match self.pipe.ask(&FromWorker::NeedEncoded { name: name.into(), encodings, released }) {
            ToWorker::Encoded { encoding, shape, len, bytes } => {
                let (data, file) = self.bytes(bytes, len)?;
                let mut weight = EncodedWeight::new(encoding, shape, data);
                weight.file = file;
                Ok(Some(weight))
            }
            ToWorker::NotEncoded => Ok(None),
            ToWorker::Refused(error) => Err(error),
            _ => Err(confused()),
        }
    }
}

/// Outputs, laid out in the shared output region, which grows as needed.
pub(super) struct Sink<'r> {
    pipe: &'r Pipe,
    region: &'r mut Option<Region>,
    placed: Vec<Placed>,
}

impl<'r> Sink<'r> {
    pub(super) fn new(pipe: &'r Pipe, region: &'r mut Option<Region>) -> Self {
        Sink { pipe, region, placed: Vec::new() }
    }

    /// Positions of the outputs.
    pub(super) fn placed(self) -> Vec<Placed> {
        self.placed
    }

    /// Requests a new region from the host.
    pub(super) fn region(pipe: &Pipe, len: usize) -> Result<Region> {
        match pipe.ask(&FromWorker::NeedRegion { len }) {
            ToWorker::Region(region) => {
                Region::attach(region.file.as_deref().ok_or_else(confused)?, region.len)
            }
            ToWorker::Refused(error) => Err(error),
            _ => Err(confused()),
        }
    }
}

impl OutputSink for Sink<'_> {
    fn allocate(&mut self, outputs: &[OutputSpec]) -> Result<Vec<&mut [u8]>> {
        let (placed, len) = Placed::lay_out(outputs.iter().map(|o| (o.dtype, &*o.shape)))
            .ok_or_else(|| Error::invalid("the outputs are too large"))?;
        if self.region.as_ref().is_none_or(|region| region.capacity() < len) {
            *self.region = None;
            *self.region = Some(Self::region(self.pipe, len)?);
        }
        let region = self.region.as_mut().ok_or_else(confused)?;
        // They are consecutive, so split them off from the front.
        let (mut rest, mut at) = (region.bytes_mut(), 0);
        let mut buffers = Vec::with_capacity(placed.len());
        for place in &placed {
            let range = place.range(len)?;
            let (buffer, after) = rest.split_at_mut(range.end - at);
            buffers.push(&mut buffer[range.start - at..]);
            (rest, at) = (after, range.end);
        }
        self.placed = placed;
        Ok(buffers)
    }
}

//! The messages between host and worker: JSON, each preceded by its length (u32, little-endian), over the worker's
//! stdin and stdout. Bulk data (tensors, models, engines) never travels here: messages name the shared-memory region
//! or file that holds it.
//!
//! The host sends [`Hello`] first, and the worker answers with its own. After that, the host sends one [`Call`] at a
//! time. During a call the worker may log ([`FromWorker::Log`]) and make requests ([`FromWorker::Progress`],
//! [`FromWorker::NeedWeight`], [`FromWorker::NeedRegion`]; the host answers each before the next). The worker ends
//! the call with [`FromWorker::Done`] or [`FromWorker::Failed`]. Unknown fields are skipped. A new kind of message is
//! only sent to a side that lists the feature.

use super::sandbox::{Confinement, Sandbox};
use sdrun_abi::{
    Assessment, BuildSpec, Capabilities, Compatibility, DType, Device, EngineInfo, Error, InitConfig,
    LogLevel, MemoryReport, OutputSpec, RefitReport, RuntimeInfo, TensorView, TimingPlan,
    ffi::PluginIdentity,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    io::{self, Read, Write},
    path::PathBuf,
};

/// Version of the protocol. Host and worker must have the same.
pub(super) const PROTOCOL: u32 = 2;
/// Feature: the worker can map weights from files itself.
pub(super) const WEIGHT_FILES: &str = "weight-files";
/// Maximum size of a message. The largest real one is the engine information of a model with thousands of weights,
/// under 1 MiB.
pub(super) const MAX_MESSAGE: usize = 16 << 20;

/// First message in each direction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) protocol: u32,
    /// Major and minor version of the plugin ABI.
    pub(super) abi: (u16, u16),
    #[serde(default)]
    pub(super) features: Vec<String>,
    /// Host to worker: the line to write to stderr before reporting a failure. It tells the host that it has read
    /// everything written before.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) mark: String,
    /// Host to worker: what it may do; all that the user may, if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) sandbox: Option<Box<Sandbox>>,
    /// Worker to host: how far the sandbox holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) confinement: Option<Confinement>,
}

impl Hello {
    pub(super) fn new(mark: String) -> Self {
        Hello {
            protocol: PROTOCOL,
            abi: (sdrun_abi::ABI_MAJOR, sdrun_abi::ABI_MINOR),
            features: vec![WEIGHT_FILES.into()],
            mark,
            sandbox: None,
            confinement: None,
        }
    }
}

/// A shared-memory region. `file` is set the first time a message names it; the worker maps it then.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct RegionRef {
    /// Identifies a region for weights, since several can be in use; 0 for other regions. A region with a file
    /// replaces the previous one in its slot.
    pub(super) slot: usize,
    /// Number of bytes in use, from the start.
    pub(super) len: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) file: Option<PathBuf>,
}

/// A tensor inside a region. Its length follows from dtype and shape.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Placed {
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    pub(super) offset: usize,
}

/// Where the bytes of a weight are stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Bytes {
    /// Unchanged in a file, which the worker maps itself.
    File {
        path: PathBuf,
        offset: u64,
    },
    Region(RegionRef),
}

/// Host to worker.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ToWorker {
    Hello(Hello),
    /// Calls are numbered from 1.
    Call {
        number: u64,
        call: Call,
    },
    /// Asks call `number` to cancel. If the call has already ended, this has no effect.
    Cancel {
        number: u64,
    },
    /// Answer to [`FromWorker::Progress`].
    Flow {
        cancel: bool,
    },
    /// Answer to [`FromWorker::NeedWeight`].
    Weight {
        dtype: DType,
        shape: Vec<usize>,
        bytes: Bytes,
    },
    /// Answer to [`FromWorker::NeedEncoded`]: a weight in blocks, `len` bytes in total.
    Encoded {
        encoding: String,
        shape: Vec<usize>,
        len: usize,
        bytes: Bytes,
    },
    /// Answer to [`FromWorker::NeedEncoded`]: the source has the weight in none of these encodings.
    NotEncoded,
    /// Answer to [`FromWorker::NeedCheck`]: the source can deliver the weight.
    Checked,
    /// Answer to [`FromWorker::NeedRegion`].
    Region(RegionRef),
    /// Answer to any request that could not be fulfilled.
    Refused(Error),
    /// Destroys objects. Has no answer.
    Drop(Dropped),
    /// Asks the worker to destroy everything and exit.
    Shutdown,
}

/// Objects that the host no longer needs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Dropped {
    pub(super) engines: Vec<u64>,
    pub(super) sessions: Vec<u64>,
    pub(super) tensors: Vec<u64>,
}

/// An input of [`Call::RunOnDevice`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Given {
    /// In the region of inputs.
    Placed(Placed),
    /// On the device.
    Tensor(u64),
}

/// The calls of the plugin ABI.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Call {
    Init {
        config: InitConfig,
    },
    Devices,
    Capabilities {
        device: String,
    },
    Build {
        model: RegionRef,
        spec: BuildSpec,
    },
    Load {
        payload: RegionRef,
        spec: BuildSpec,
    },
    Assess {
        model: RegionRef,
        spec: BuildSpec,
    },
    Check {
        compatibility: String,
        device: String,
    },
    Serialize {
        engine: u64,
    },
    Bake {
        engine: u64,
    },
    Session {
        engine: u64,
    },
    /// `changed` refers to a JSON list of names: thousands would not fit in the pipe's buffer.
    Refit {
        session: u64,
        changed: RegionRef,
    },
    Run {
        session: u64,
        inputs: Vec<Placed>,
        region: RegionRef,
    },
    /// As `Run`, with tensors on the device. `keep` says for each output whether it stays there.
    RunOnDevice {
        session: u64,
        inputs: Vec<Given>,
        region: RegionRef,
        keep: Vec<bool>,
    },
    /// Answered with [`Reply::Outputs`].
    ReadTensor {
        tensor: u64,
    },
    /// As `Run`, many times; the worker measures the times.
    Time {
        session: u64,
        inputs: Vec<Placed>,
        region: RegionRef,
        plan: TimingPlan,
    },
    Memory {
        session: u64,
    },
}

/// Worker to host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FromWorker {
    Hello {
        hello: Hello,
        plugin: Result<PluginIdentity, Error>,
    },
    Log {
        level: LogLevel,
        target: String,
        message: String,
    },
    Progress {
        phase: String,
        step: u64,
        total: u64,
    },
    /// `released` lists the slots of earlier weights that are no longer in use.
    NeedWeight {
        name: String,
        released: Vec<usize>,
    },
    /// As `NeedWeight`, in one of `encodings`.
    NeedEncoded {
        name: String,
        encodings: Vec<String>,
        released: Vec<usize>,
    },
    /// Asks whether the source can deliver a weight.
    NeedCheck {
        name: String,
    },
    /// Requests a region for outputs or a serialized engine; it replaces the previous one.
    NeedRegion {
        len: usize,
    },
    Done(Reply),
    Failed(Error),
}

/// The result of a call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Reply {
    Runtime(RuntimeInfo),
    Devices(Vec<Device>),
    Capabilities(Capabilities),
    Engine {
        engine: u64,
        info: EngineInfo,
    },
    Verdict(Compatibility),
    Assessment(Assessment),
    /// The serialized engine is at the start of the region requested last.
    Payload {
        len: usize,
    },
    Session {
        session: u64,
    },
    Refit(RefitReport),
    /// The outputs are in the region requested last, in this run or an earlier one.
    Outputs(Vec<Placed>),
    /// As `Outputs`, plus the tensors that stay on the device.
    Kept {
        outputs: Vec<Placed>,
        tensors: Vec<(u64, OutputSpec)>,
    },
    /// Milliseconds.
    Times(Vec<f64>),
    Memory(MemoryReport),
}

impl Placed {
    /// Lays tensors out consecutively, 64-byte aligned. Also returns the length of the region; `None` on overflow.
    pub(super) fn lay_out<'a>(
        tensors: impl IntoIterator<Item = (DType, &'a [usize])>,
    ) -> Option<(Vec<Placed>, usize)> {
        let mut end = 0usize;
        let mut placed = Vec::new();
        for (dtype, shape) in tensors {
            let offset = end.checked_next_multiple_of(64)?;
            end = offset.checked_add(dtype.bytes_of(shape)?)?;
            placed.push(Placed { dtype, shape: shape.to_vec(), offset });
        }
        Some((placed, end))
    }

    /// The range of bytes. Fails unless it lies within `len` bytes.
    pub(super) fn range(&self, len: usize) -> Result<std::ops::Range<usize>, Error> {
        self.dtype
            .bytes_of(&self.shape)
            .and_then(|n| self.offset.checked_add(n))
            .filter(|end| *end <= len)
            .map(|end| self.offset..end)
            .ok_or_else(|| {
                Error::internal(format!(
                    "a {} tensor of shape {:?} at {} does not lie in a shared region of {len} bytes",
                    self.dtype, self.shape, self.offset
                ))
            })
    }

    /// Borrows the tensor from the bytes of its region.
    pub(super) fn view<'a>(&'a self, region: &'a [u8]) -> Result<TensorView<'a>, Error> {
        Ok(TensorView { dtype: self.dtype, shape: &self.shape, data: &region[self.range(region.len())?] })
    }

    pub(super) fn spec(&self) -> OutputSpec {
        OutputSpec { dtype: self.dtype, shape: self.shape.clone() }
    }
}

/// Sends a message with a single write. `buffer` is scratch space kept between calls.
pub(super) fn send<T: Serialize>(pipe: &mut impl Write, buffer: &mut Vec<u8>, message: &T) -> io::Result<()> {
    buffer.clear();
    buffer.extend([0; 4]);
    serde_json::to_writer(&mut *buffer, message)?;
    let len = buffer.len() - 4;
    if len > MAX_MESSAGE {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("a message of {len} bytes is longer than the {MAX_MESSAGE} allowed"),
        ));
    }
    buffer[..4].copy_from_slice(&(len as u32).to_le_bytes());
    pipe.write_all(buffer)?;
    pipe.flush()
}

/// Receives a message; `None` at the end of the stream, including an end within a message (the other side died).
/// `InvalidData` if it is not a valid message.
pub(super) fn receive<T: DeserializeOwned>(
    pipe: &mut impl Read,
    buffer: &mut Vec<u8>,
) -> io::Result<Option<T>> {
    let mut header = [0; 4];
    match pipe.read_exact(&mut header) {
        Ok(()) => {}
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(e) => return Err(e),
    }
    let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
    let len = u32::from_le_bytes(header) as usize;
    if len > MAX_MESSAGE {
        return Err(invalid(format!("it claims a message of {len} bytes")));
    }
    buffer.clear();
    // Grows with the bytes received, not with the claimed length.
    pipe.take(len as u64).read_to_end(buffer)?;
    if buffer.len() < len {
        return Ok(None);
    }
    serde_json::from_slice(buffer).map(Some).map_err(|e| invalid(format!("it is not a known message: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(mut bytes: &[u8]) -> io::Result<Option<FromWorker>> {
        receive(&mut bytes, &mut Vec::new())
    }

    fn framed(text: &str) -> Vec<u8> {
        [&(text.len() as u32).to_le_bytes(), text.as_bytes()].concat()
    }

    #[test]
    fn unknown_fields_are_skipped_and_unknown_messages_refused() {
        let known = framed(r#"{"need_region":{"len":7,"colour":"red"}}"#);
        assert_eq!(read(&known).unwrap(), Some(FromWorker::NeedRegion { len: 7 }));
        let error = read(&framed(r#"{"dance":{}}"#)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn end_of_stream_is_no_message() {
        let whole = framed(r#"{"need_region":{"len":7}}"#);
        for cut in 0..whole.len() {
            assert_eq!(read(&whole[..cut]).unwrap(), None, "cut at {cut}");
        }
    }

    #[test]
    fn too_long_is_refused_on_both_sides() {
        let mut claim = (MAX_MESSAGE as u32 + 1).to_le_bytes().to_vec();
        claim.push(b'{');
        assert!(read(&claim).unwrap_err().to_string().contains("claims"));
        let message = FromWorker::Failed(Error::internal("x".repeat(MAX_MESSAGE)));
        let mut out = Vec::new();
        assert_eq!(
            send(&mut out, &mut Vec::new(), &message).unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
        assert!(out.is_empty(), "nothing is sent of a message that is too long");
    }

    #[test]
    fn layout_is_aligned_and_checked() {
        let (placed, len) =
            Placed::lay_out([(DType::U8, &[3][..]), (DType::F32, &[5]), (DType::F64, &[])]).unwrap();
        assert_eq!(placed.iter().map(|p| p.offset).collect::<Vec<_>>(), [0, 64, 128]);
        assert_eq!(len, 136);
        assert_eq!(placed[2].range(136).unwrap(), 128..136);
        assert!(placed[2].range(135).is_err());
        assert!(Placed::lay_out([(DType::F64, &[usize::MAX / 8, 2][..])]).is_none());
        assert!(Placed::lay_out([(DType::U8, &[usize::MAX - 2][..]), (DType::U8, &[1])]).is_none());
        let overflow = Placed { dtype: DType::U8, shape: vec![2], offset: usize::MAX };
        assert!(overflow.range(usize::MAX).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&bytes);
        }

        #[test]
        fn what_is_sent_arrives(name in ".{0,50}", released in proptest::collection::vec(any::<usize>(), 0..9), len: usize) {
            let messages = [FromWorker::NeedWeight { name, released }, FromWorker::NeedRegion { len }];
            let (mut pipe, mut buffer) = (Vec::new(), Vec::new());
            for message in &messages {
                send(&mut pipe, &mut buffer, message).unwrap();
            }
            let mut rest = &pipe[..];
            for message in &messages {
                let arrived: Option<FromWorker> = receive(&mut rest, &mut buffer).unwrap();
                prop_assert_eq!(arrived.as_ref(), Some(message));
            }
            prop_assert_eq!(receive::<FromWorker>(&mut rest, &mut buffer).unwrap(), None);
        }
    }
}

//! A program's buffers, and running the program on them.

use super::{
    api::{Api, Object, Owned, c_string, call},
    hip::{DeviceBuffer, Hip, Stream},
    program::Program,
    shape::Layout,
};
use sdrun_abi::{AlignedBuffer, Error, Result};
use std::{collections::HashMap, ffi::c_void, marker::PhantomData, ptr, slice, sync::Arc};

/// Memory that a program reads or writes.
pub(crate) enum Buffer {
    /// Memory of this process, for the target `ref`.
    Host(AlignedBuffer),
    /// Memory of a device, for the target `gpu`.
    Device(DeviceBuffer),
}

impl Buffer {
    pub(crate) fn len(&self) -> usize {
        match self {
            Buffer::Host(buffer) => buffer.len(),
            Buffer::Device(buffer) => buffer.len(),
        }
    }

    /// The start address. Several programs may use it at once as long as none of them writes.
    fn address(&self) -> *mut c_void {
        match self {
            Buffer::Host(buffer) => buffer.as_ptr().cast_mut().cast(),
            Buffer::Device(buffer) => buffer.address(),
        }
    }

    /// Replaces the contents.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match self {
            Buffer::Host(buffer) if buffer.len() == bytes.len() => {
                buffer.copy_from_slice(bytes);
                Ok(())
            }
            Buffer::Host(buffer) => {
                Err(Error::internal(format!("{} bytes for a buffer of {}", bytes.len(), buffer.len())))
            }
            Buffer::Device(buffer) => buffer.upload(bytes),
        }
    }
}

/// Buffers by parameter name. Owning them keeps the addresses valid that the library received.
pub(crate) struct Bound {
    parameters: Owned,
    buffers: HashMap<String, Arc<Buffer>>,
}

impl Bound {
    pub(crate) fn new(api: &Api) -> Result<Self> {
        let parameters = Owned::new(&api.program_parameters_destroy, |out| {
            call!(api, program_parameters_create(out), || "make a list of parameters".into())
        })?;
        Ok(Bound { parameters, buffers: HashMap::new() })
    }

    /// Binds a buffer that holds a row-major tensor and returns the previously bound one. Several programs may share
    /// a buffer that they only read. A buffer that a run writes must belong to one program alone.
    pub(crate) fn bind(
        &mut self,
        api: &Api,
        name: &str,
        layout: &Layout,
        buffer: Arc<Buffer>,
    ) -> Result<Option<Arc<Buffer>>> {
        let doing = || format!("bind the parameter `{name}`");
        let needed = layout.dtype.bytes_of(&layout.lengths);
        if needed != Some(buffer.len()) || !layout.is_packed() {
            return Err(Error::internal(format!(
                "a buffer of {} bytes does not hold the parameter `{name}`, {layout:?}",
                buffer.len()
            )));
        }
        let shape = api.shape_of(layout)?;
        let argument = Owned::new(&api.argument_destroy, |out| {
            call!(api, argument_create(out, shape.object(), buffer.address()), doing)
        })?;
        let c_name = c_string(name)?;
        call!(
            api,
            program_parameters_add(self.parameters.object(), c_name.as_ptr(), argument.object()),
            doing
        )?;
        Ok(self.buffers.insert(name.to_string(), buffer))
    }

    /// Replaces the contents of a buffer that nothing else shares.
    pub(crate) fn write(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        let buffer = self.buffers.get_mut(name).and_then(Arc::get_mut);
        buffer
            .ok_or_else(|| Error::internal(format!("the parameter `{name}` has no buffer of its own")))?
            .write(bytes)
    }

    /// Whether a buffer is bound to the parameter.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.buffers.contains_key(name)
    }

    /// All buffers with their parameter names.
    pub(crate) fn buffers(&self) -> impl Iterator<Item = (&str, &Arc<Buffer>)> {
        self.buffers.iter().map(|(name, buffer)| (name.as_str(), buffer))
    }

    /// Runs `program` on the buffers, on `stream` if they are device memory. The run has finished when this returns.
    pub(crate) fn run(
        &mut self,
        api: &Api,
        program: &mut Program,
        stream: Option<&Stream>,
    ) -> Result<Results<'_>> {
        let doing = || "run the program".to_string();
        let (program, parameters) = (program.object(), self.parameters.object());
        let results = Owned::new(&api.arguments_destroy, |out| match stream {
            None => call!(api, program_run(out, program, parameters), doing),
            // MIGraphX checks the name of the stream's type as text.
            Some(stream) => call!(
                api,
                program_run_async(out, program, parameters, stream.handle(), c"ihipStream_t".as_ptr()),
                doing
            ),
        })?;
        if let Some(stream) = stream {
            stream.synchronize()?;
        }
        Ok(Results { results, hip: stream.map(Stream::hip), buffers: PhantomData })
    }
}

/// The results of a run. The buffers cannot change while this lives.
pub(crate) struct Results<'b> {
    results: Owned,
    /// The runtime that owns the results' memory; `None` for memory of this process.
    hip: Option<&'static Hip>,
    buffers: PhantomData<&'b Bound>,
}

impl Results<'_> {
    /// The outputs, in order.
    pub(crate) fn outputs<'r>(&'r self, api: &Api) -> Result<Vec<Output<'r>>> {
        let mut count = 0;
        call!(api, arguments_size(&mut count, self.results.object()), || "list the results".into())?;
        (0..count)
            .map(|index| {
                let doing = || format!("deliver result {index}");
                let (mut argument, mut shape): (Object, Object) = (ptr::null_mut(), ptr::null_mut());
                call!(api, arguments_get(&mut argument, self.results.object(), index), doing)?;
                call!(api, argument_shape(&mut shape, argument), doing)?;
                let mut data = ptr::null_mut();
                call!(api, argument_buffer(&mut data, argument), doing)?;
                Ok(Output { results: self, index, layout: api.layout(shape)?, data: data.cast() })
            })
            .collect()
    }
}

/// One output of a run.
pub(crate) struct Output<'r> {
    results: &'r Results<'r>,
    index: usize,
    /// Type and shape of the output.
    pub(crate) layout: Layout,
    data: *mut c_void,
}

impl Output<'_> {
    /// Copies the output in row-major order into `to`, which must have exactly its size.
    pub(crate) fn read(&self, to: &mut [u8]) -> Result<()> {
        let Output { results, index, layout, data } = self;
        let bytes = layout.span() * layout.dtype.size();
        if layout.dtype.bytes_of(&layout.lengths) != Some(to.len()) {
            return Err(Error::internal(format!("{} bytes for result {index}, {layout:?}", to.len())));
        }
        if bytes == 0 {
            return Ok(());
        }
        if data.is_null() {
            return Err(Error::internal(format!("MIGraphX returned result {index} without data")));
        }
        match results.hip {
            // The data is in one of our output buffers or elsewhere: an input passed through, part of a larger
            // tensor, a constant.
            Some(hip) => {
                let mut host = vec![0; bytes];
                // SAFETY: the library keeps `span` elements at this address while `results` lives, and the run has
                // finished.
                unsafe { hip.read(*data, &mut host)? };
                layout.pack(&host, to);
            }
            // SAFETY: as above.
            None => layout.pack(unsafe { slice::from_raw_parts(data.cast(), bytes) }, to),
        }
        Ok(())
    }
}

//! The buffers a program runs on, and the run itself.

use super::{
    api::{Api, Object, Owned, c_string, call},
    hip::{DeviceBuffer, Hip, Stream},
    program::Program,
    shape::Layout,
};
use sdrun_abi::{AlignedBuffer, Error, Result};
use std::{collections::HashMap, ffi::c_void, marker::PhantomData, ptr, slice, sync::Arc};

/// Memory a program reads or writes.
pub(crate) enum Buffer {
    /// Of this process, for the target `ref`.
    Host(AlignedBuffer),
    /// Of a device, for the target `gpu`.
    Device(DeviceBuffer),
}

impl Buffer {
    pub(crate) fn len(&self) -> usize {
        match self {
            Buffer::Host(buffer) => buffer.len(),
            Buffer::Device(buffer) => buffer.len(),
        }
    }

    /// Where it begins. Several programs may be given it at a time, as long as none writes.
    fn address(&self) -> *mut c_void {
        match self {
            Buffer::Host(buffer) => buffer.as_ptr().cast_mut().cast(),
            Buffer::Device(buffer) => buffer.address(),
        }
    }

    /// Replaces its contents.
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

/// Buffers by parameter name. It holds them, so that what the library is told stays true.
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

    /// Binds a buffer that holds a row-major tensor; answers the one bound before. Several programs may read one, what a
    /// run writes belongs to one alone.
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

    /// Replaces the contents of a buffer that is bound nowhere else.
    pub(crate) fn write(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        let buffer = self.buffers.get_mut(name).and_then(Arc::get_mut);
        buffer
            .ok_or_else(|| Error::internal(format!("the parameter `{name}` has no buffer of its own")))?
            .write(bytes)
    }

    /// Whether a buffer is bound to a parameter.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.buffers.contains_key(name)
    }

    /// All buffers, by parameter.
    pub(crate) fn buffers(&self) -> impl Iterator<Item = (&str, &Arc<Buffer>)> {
        self.buffers.iter().map(|(name, buffer)| (name.as_str(), buffer))
    }

    /// Runs `program` on them, on `stream` where they lie on a device; it is over when this returns.
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
            // The type's name is compared as text.
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

/// What a run returned; the buffers stay as they are as long as it lives.
pub(crate) struct Results<'b> {
    results: Owned,
    /// The runtime whose memory the results lie in; `None` for memory of this process.
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

/// An output of a run.
pub(crate) struct Output<'r> {
    results: &'r Results<'r>,
    index: usize,
    /// Its type and shape.
    pub(crate) layout: Layout,
    data: *mut c_void,
}

impl Output<'_> {
    /// Copies it, row-major, into `to`, which has room for exactly its elements.
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
            return Err(Error::internal(format!("MIGraphX delivers result {index} without its data")));
        }
        match results.hip {
            // An output buffer of ours, or another place: an input passed through, a part of a larger tensor, a constant.
            Some(hip) => {
                let mut host = vec![0; bytes];
                // SAFETY: the library holds `span` elements there as long as `results` lives, and the run is over.
                unsafe { hip.read(*data, &mut host)? };
                layout.pack(&host, to);
            }
            // SAFETY: as above.
            None => layout.pack(unsafe { slice::from_raw_parts(data.cast(), bytes) }, to),
        }
        Ok(())
    }
}

//! Weight sources across the ABI.

use super::{contain, dtype_from_raw, error_from_raw, error_to_raw, shape_from_raw};
use crate::{
    EncodedWeight, Error, Result, TakeRows, Weight, WeightSource,
    ffi::{prefix, raw::*},
    weight::Bytes,
};
use std::{ffi::c_void, marker::PhantomData, ops::Deref, panic::catch_unwind, path::PathBuf, ptr};

struct SourceRef<'a>(&'a dyn WeightSource);

/// Keeps a delivered weight, its dimensions and its texts alive until `release`.
struct Lent<'a> {
    bytes: Bytes<'a>,
    dims: Vec<u64>,
    path: String,
    encoding: String,
}

impl<'a> Lent<'a> {
    fn new(bytes: Bytes<'a>, shape: &[usize], encoding: String, file: Option<(PathBuf, u64)>) -> (Self, u64) {
        // A path that is not UTF-8 cannot cross the ABI, but the bytes can.
        let (path, offset) = match file {
            Some((path, offset)) => (path.into_os_string().into_string().unwrap_or_default(), offset),
            None => (String::new(), 0),
        };
        (Lent { bytes, dims: shape.iter().map(|d| *d as u64).collect(), path, encoding }, offset)
    }

    /// Fills `out`, which owns `self` afterwards.
    ///
    /// # Safety
    /// `out` points to the caller's `RawWeight`.
    unsafe fn into_raw(self, offset: u64, dtype: u32, out: *mut RawWeight) -> Result<()> {
        // SAFETY: guaranteed by the caller.
        unsafe { prefix::read_whole("the room for a weight", out)? };
        let lent = Box::new(self);
        let raw = RawWeight {
            dtype,
            rank: lent.dims.len(),
            dims: lent.dims.as_ptr(),
            data: lent.bytes.as_ptr(),
            len: lent.bytes.len(),
            file: RawStr::new(lent.path.as_bytes()),
            offset,
            encoding: RawStr::new(lent.encoding.as_bytes()),
            owner: Box::into_raw(lent).cast(),
            ..RawWeight::EMPTY
        };
        // SAFETY: guaranteed by the caller.
        unsafe { prefix::write(out, &raw) };
        Ok(())
    }
}

unsafe extern "C" fn source_get(ctx: *const c_void, name: RawStr, out: *mut RawWeight) -> *mut RawError {
    error_to_raw(contain("the host's weight source", || {
        // SAFETY: `ctx` is the `SourceRef` lent by `with_source`, `name` is valid during the call.
        let (source, name) = unsafe { ((*ctx.cast::<SourceRef>()).0, name.text()) };
        let mut weight = source.get(&name)?;
        let (dtype, shape, file) = (weight.dtype, std::mem::take(&mut weight.shape), weight.file.take());
        let (lent, offset) = Lent::new(weight.into_bytes(), &shape, String::new(), file);
        // SAFETY: `out` belongs to the caller.
        unsafe { lent.into_raw(offset, dtype as u32, out) }
    }))
}

unsafe extern "C" fn source_get_encoded(
    ctx: *const c_void,
    name: RawStr,
    encodings: *const RawStr,
    encoding_count: usize,
    out: *mut RawWeight,
) -> *mut RawError {
    error_to_raw(contain("the host's weight source", || {
        // SAFETY: as in `source_get`; there are `encoding_count` `encodings`.
        let (source, name, encodings) = unsafe {
            let encodings: Vec<String> = (0..encoding_count).map(|i| (*encodings.add(i)).text()).collect();
            ((*ctx.cast::<SourceRef>()).0, name.text(), encodings)
        };
        let encodings: Vec<&str> = encodings.iter().map(String::as_str).collect();
        let Some(mut weight) = source.encoded(&name, &encodings)? else { return Ok(()) };
        let (encoding, shape, file) =
            (std::mem::take(&mut weight.encoding), std::mem::take(&mut weight.shape), weight.file.take());
        let (lent, offset) = Lent::new(weight.into_bytes(), &shape, encoding, file);
        // SAFETY: `out` belongs to the caller.
        unsafe { lent.into_raw(offset, 0, out) }
    }))
}

unsafe extern "C" fn source_check(ctx: *const c_void, name: RawStr) -> *mut RawError {
    error_to_raw(contain("the host's weight source", || {
        // SAFETY: as in `source_get`.
        let (source, name) = unsafe { ((*ctx.cast::<SourceRef>()).0, name.text()) };
        source.check(&name)
    }))
}

unsafe extern "C" fn source_get_rows(
    ctx: *const c_void,
    name: RawStr,
    transposed: u32,
    step: usize,
    taker: *mut c_void,
    take: unsafe extern "C" fn(*mut c_void, usize, *const RawWeight) -> *mut RawError,
    delivered: *mut u32,
) -> *mut RawError {
    error_to_raw(contain("the host's weight source", || {
        // SAFETY: as in `source_get`.
        let (source, name) = unsafe { ((*ctx.cast::<SourceRef>()).0, name.text()) };
        let mut lend = |first: usize, rows: Weight<'_>| {
            let dims: Vec<u64> = rows.shape.iter().map(|d| *d as u64).collect();
            let raw = RawWeight {
                dtype: rows.dtype as u32,
                rank: dims.len(),
                dims: dims.as_ptr(),
                data: rows.data().as_ptr(),
                len: rows.data().len(),
                ..RawWeight::EMPTY
            };
            // SAFETY: the caller's own function and value; `raw` lives until it returns.
            unsafe { error_from_raw(take(taker, first, &raw)) }
        };
        if source.rows(&name, transposed != 0, step, &mut lend)? {
            // SAFETY: `delivered` belongs to the caller.
            unsafe { *delivered = 1 };
        }
        Ok(())
    }))
}

unsafe extern "C" fn source_release(_: *const c_void, weight: *mut RawWeight) {
    // SAFETY: `owner` is the box leaked by `Lent::into_raw`, passed back once.
    let _ = catch_unwind(|| unsafe {
        if !weight.is_null() && !(*weight).owner.is_null() {
            drop(Box::from_raw((*weight).owner.cast::<Lent>()));
            (*weight).owner = ptr::null_mut();
        }
    });
}

/// Lends a weight source to C for the duration of `body`.
pub fn with_source<T>(source: &dyn WeightSource, body: impl FnOnce(&RawWeightSource) -> T) -> T {
    let reference = SourceRef(source);
    body(&RawWeightSource {
        struct_size: size_of::<RawWeightSource>() as u32,
        reserved: 0,
        ctx: (&raw const reference).cast(),
        get: Some(source_get),
        release: Some(source_release),
        get_encoded: Some(source_get_encoded),
        check: Some(source_check),
        get_rows: Some(source_get_rows),
    })
}

/// A weight source on the other side of the ABI.
pub struct ForeignSource<'a>(Option<RawWeightSource>, PhantomData<&'a RawWeightSource>);

// SAFETY: the ABI allows calls of a source's functions from any thread.
unsafe impl Sync for ForeignSource<'_> {}

impl ForeignSource<'_> {
    /// # Safety
    /// `raw` is null or valid for the lifetime of the value.
    pub unsafe fn new(raw: *const RawWeightSource) -> Self {
        // SAFETY: guaranteed by the caller.
        ForeignSource(unsafe { prefix::read(raw) }, PhantomData)
    }
}

/// The bytes of a weight; releases them on drop.
struct ForeignBytes<'a> {
    source: &'a RawWeightSource,
    raw: RawWeight,
}

// SAFETY: the ABI allows any thread to release a weight, and the bytes are only read.
unsafe impl Send for ForeignBytes<'_> {}

impl Deref for ForeignBytes<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the source keeps the bytes until `release`, which happens on drop.
        unsafe { RawStr { ptr: self.raw.data, len: self.raw.len }.bytes() }
    }
}

impl Drop for ForeignBytes<'_> {
    fn drop(&mut self) {
        if let Some(release) = self.source.release {
            // SAFETY: released once, here.
            unsafe { release(self.source.ctx, &mut self.raw) }
        }
    }
}

impl ForeignBytes<'_> {
    fn shape_and_file(&self) -> (Vec<usize>, Option<(PathBuf, u64)>) {
        // SAFETY: `dims` has `rank` numbers; both live until `release`.
        let (shape, path) = unsafe { (shape_from_raw(self.raw.dims, self.raw.rank), self.raw.file.text()) };
        (shape, (!path.is_empty()).then(|| (path.into(), self.raw.offset)))
    }
}

/// The closure that takes rows, behind the pointer that crosses the ABI.
struct Taker<'a>(TakeRows<'a>);

unsafe extern "C" fn take_rows(taker: *mut c_void, first: usize, rows: *const RawWeight) -> *mut RawError {
    error_to_raw(contain("the code that takes a weight's rows", || {
        // SAFETY: the source passes on the pointer that `rows` gave it, from one thread at a time, and a valid weight.
        let (taker, raw) =
            unsafe { (&mut *taker.cast::<Taker>(), prefix::read_whole("rows of a weight", rows)?) };
        let dtype = dtype_from_raw(raw.dtype, || "a part of a weight".into())?;
        // SAFETY: the source keeps dimensions and bytes until this function returns.
        let (shape, bytes) =
            unsafe { (shape_from_raw(raw.dims, raw.rank), RawStr { ptr: raw.data, len: raw.len }.bytes()) };
        (taker.0)(first, Weight::new(dtype, shape, bytes)?)
    }))
}

impl WeightSource for ForeignSource<'_> {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        let (source, get) = self
            .0
            .as_ref()
            .and_then(|s| Some((s, s.get?)))
            .ok_or_else(|| Error::precondition("the host provided no weight source"))?;
        let mut raw = RawWeight::EMPTY;
        // SAFETY: the source's own function; `raw` is ours.
        unsafe { error_from_raw(get(source.ctx, RawStr::new(name.as_bytes()), &mut raw))? };
        let bytes = ForeignBytes { source, raw };
        let dtype = dtype_from_raw(raw.dtype, || format!("weight {name:?}"))?;
        let (shape, file) = bytes.shape_and_file();
        let mut weight = Weight::new(dtype, shape, bytes)?;
        weight.file = file;
        Ok(weight)
    }

    fn check(&self, name: &str) -> Result<()> {
        let Some((source, check)) = self.0.as_ref().and_then(|s| Some((s, s.check?))) else {
            return self.get(name).map(drop);
        };
        // SAFETY: the source's own function.
        unsafe { error_from_raw(check(source.ctx, RawStr::new(name.as_bytes()))) }
    }

    fn rows(&self, name: &str, transposed: bool, step: usize, take: TakeRows<'_>) -> Result<bool> {
        let Some((source, get)) = self.0.as_ref().and_then(|s| Some((s, s.get_rows?))) else {
            return Ok(false);
        };
        let (mut taker, mut delivered) = (Taker(take), 0);
        let (name, taker) = (RawStr::new(name.as_bytes()), (&raw mut taker).cast());
        // SAFETY: the source's own function; what the pointers name is ours and outlives the call.
        unsafe {
            error_from_raw(get(source.ctx, name, transposed.into(), step, taker, take_rows, &mut delivered))?
        };
        Ok(delivered != 0)
    }

    fn encoded(&self, name: &str, encodings: &[&str]) -> Result<Option<EncodedWeight<'_>>> {
        let Some((source, get)) = self.0.as_ref().and_then(|s| Some((s, s.get_encoded?))) else {
            return Ok(None);
        };
        let wanted: Vec<RawStr> = encodings.iter().map(|e| RawStr::new(e.as_bytes())).collect();
        let mut raw = RawWeight::EMPTY;
        // SAFETY: the source's own function; `raw` and the list are ours.
        let error =
            unsafe { get(source.ctx, RawStr::new(name.as_bytes()), wanted.as_ptr(), wanted.len(), &mut raw) };
        // SAFETY: the result of the call, converted once.
        unsafe { error_from_raw(error)? };
        if raw.encoding.len == 0 {
            return Ok(None);
        }
        let bytes = ForeignBytes { source, raw };
        // SAFETY: the text lives until `release`.
        let encoding = unsafe { raw.encoding.text() };
        if !encodings.contains(&encoding.as_str()) {
            return Err(Error::internal(format!(
                "weight {name:?} has the encoding {encoding:?}, which was not requested"
            )));
        }
        let (shape, file) = bytes.shape_and_file();
        let mut weight = EncodedWeight::new(encoding, shape, bytes);
        weight.file = file;
        Ok(Some(weight))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use std::mem::offset_of;

    /// One weight of two f32, and the same weight as one block.
    struct Two;

    impl WeightSource for Two {
        fn get(&self, _: &str) -> Result<Weight<'_>> {
            Ok(Weight::new(DType::F32, vec![2], vec![1u8; 8])?.in_file("/w".into(), 9))
        }
        fn encoded(&self, _: &str, encodings: &[&str]) -> Result<Option<EncodedWeight<'_>>> {
            Ok(encodings.contains(&"q").then(|| EncodedWeight::new("q", vec![2], vec![7u8; 3])))
        }
        fn check(&self, name: &str) -> Result<()> {
            if name == "w" { Ok(()) } else { Err(Error::not_found("no such weight")) }
        }
        fn rows(&self, _: &str, transposed: bool, step: usize, take: TakeRows<'_>) -> Result<bool> {
            if transposed {
                return Ok(false);
            }
            for first in [0, step] {
                take(first, Weight::new(DType::F32, vec![1], [first as u8; 4].as_slice())?)?;
            }
            Ok(true)
        }
    }

    #[test]
    fn weights_cross_plain_and_in_blocks() {
        with_source(&Two, |raw| {
            // SAFETY: lent for this call.
            let source = unsafe { ForeignSource::new(raw) };
            let weight = source.get("w").unwrap();
            assert_eq!((weight.data(), weight.file.clone()), (&[1u8; 8][..], Some(("/w".into(), 9))));
            let blocks = source.encoded("w", &["p", "q"]).unwrap().unwrap();
            assert_eq!(
                (blocks.encoding.as_str(), &blocks.shape[..], blocks.data()),
                ("q", &[2][..], &[7u8; 3][..])
            );
            assert!(source.encoded("w", &["p"]).unwrap().is_none());
            assert_eq!(source.check("w"), Ok(()));
            assert_eq!(source.check("v").unwrap_err().message, "no such weight");
        });
    }

    #[test]
    fn rows_cross_one_call_at_a_time() {
        with_source(&Two, |raw| {
            // SAFETY: lent for this call.
            let source = unsafe { ForeignSource::new(raw) };
            let mut taken = Vec::new();
            let mut take = |first, rows: Weight<'_>| {
                taken.push((first, rows.dtype, rows.shape.clone(), rows.data().to_vec()));
                Ok(())
            };
            assert_eq!(source.rows("w", true, 1, &mut take), Ok(false));
            assert_eq!(source.rows("w", false, 1, &mut take), Ok(true));
            let rows = |first: usize| (first, DType::F32, vec![1], vec![first as u8; 4]);
            assert_eq!(taken, [rows(0), rows(1)]);
            let mut calls = 0;
            let mut refuses = |_, _: Weight<'_>| {
                calls += 1;
                Err(Error::invalid("enough"))
            };
            assert_eq!(source.rows("w", false, 1, &mut refuses).unwrap_err().message, "enough");
            assert_eq!(calls, 1);
            let mut panics = |_, _: Weight<'_>| panic!("rows");
            let error = source.rows("w", false, 1, &mut panics).unwrap_err();
            assert!(
                error.message.contains("panic in the code that takes a weight's rows: rows"),
                "{error:?}"
            );
        });
    }

    #[test]
    fn an_older_host_has_only_plain_weights() {
        with_source(&Two, |raw| {
            let shorter =
                RawWeightSource { struct_size: offset_of!(RawWeightSource, get_encoded) as u32, ..*raw };
            // SAFETY: as above.
            let source = unsafe { ForeignSource::new(&shorter) };
            assert!(source.encoded("w", &["q"]).unwrap().is_none());
            assert_eq!(source.get("w").unwrap().data().len(), 8);
            // `get` tells, which knows any name.
            assert_eq!(source.check("v"), Ok(()));
            assert_eq!(source.rows("w", false, 1, &mut |_, _| Ok(())), Ok(false));
        });
    }

    #[test]
    fn a_short_weight_struct_is_refused_and_unchanged() {
        with_source(&Two, |raw| {
            let get = raw.get.unwrap();
            let mut room = RawWeight { struct_size: 16, len: 77, ..RawWeight::EMPTY };
            // SAFETY: the source's own function; the room is longer than it says.
            let error = unsafe { error_from_raw(get(raw.ctx, RawStr::new(b"w"), &mut room)) }.unwrap_err();
            assert!(error.message.contains("at least 88"), "{error}");
            assert_eq!((room.len, room.owner), (77, ptr::null_mut()));
        });
    }
}

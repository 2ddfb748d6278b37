//! NumPy's `.npy` format (numpy/lib/format.py): a magic, a version, a Python dictionary as text, raw elements.
//!
//! It has no bf16 and no f8. bf16 tensors are written as f32, which loses nothing; f8 ones are refused.

use super::open;
use crate::HostTensor;
use sdrun_abi::{DType, Error};
use std::{
    io::{self, BufReader, Read, Write},
    path::Path,
};

const MAGIC: &[u8; 6] = b"\x93NUMPY";
/// Longest accepted header; numpy itself refuses to parse more than 10 000 bytes by default.
const MAX_HEADER: usize = 64 << 10;
/// numpy's own limit on the number of dimensions.
const MAX_RANK: usize = 64;
/// numpy's alignment of the elements.
const ALIGNMENT: usize = 64;

/// The contents of a header.
#[derive(Debug, PartialEq)]
struct Header {
    dtype: DType,
    big_endian: bool,
    fortran_order: bool,
    shape: Vec<usize>,
}

/// Reads a file whose type and shape pass `check`.
///
/// # Errors
/// Errors of `check`; `DataLoss` for a damaged file; `Unimplemented` for an element type that [`DType`] does not have; errors of reading
/// and of allocating.
pub fn read(
    path: &Path,
    check: impl FnOnce(DType, &[usize]) -> Result<(), Error>,
) -> Result<HostTensor, Error> {
    let (file, size) = open(path)?;
    read_from(&mut BufReader::new(file), size, check).map_err(|fault| fault.of(path))
}

/// Why a `.npy` file cannot be read.
pub(super) enum Fault {
    Damaged(String),
    Unsupported(String),
    Unfit(Error),
    Io(io::Error),
}

impl Fault {
    /// The error for this fault in a file.
    pub(super) fn of(self, path: &Path) -> Error {
        match self {
            Fault::Damaged(why) => Error::damaged(path, format!("is not a valid .npy file: {why}")),
            Fault::Unsupported(why) => Error::unsupported(format!("{} {why}", path.display()))
                .with_file(path)
                .with_hint("convert the array with numpy's `astype` and save it again"),
            Fault::Unfit(error) => error.with_file(path),
            Fault::Io(e) => Error::io("read", path, &e),
        }
    }
}

fn bad<T>(why: impl Into<String>) -> Result<T, Fault> {
    Err(Fault::Damaged(why.into()))
}

/// Reads `.npy` data of `size` bytes. Never allocates more than the data holds, and nothing if `check` refuses the type and the shape.
pub(super) fn read_from(
    input: &mut impl Read,
    size: u64,
    check: impl FnOnce(DType, &[usize]) -> Result<(), Error>,
) -> Result<HostTensor, Fault> {
    let mut exact = |buffer: &mut [u8]| {
        input.read_exact(buffer).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => Fault::Damaged("it is truncated".into()),
            io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput => Fault::Damaged(e.to_string()),
            _ => Fault::Io(e),
        })
    };
    let mut start = [0; 8];
    exact(&mut start)?;
    if !start.starts_with(MAGIC) {
        return bad("it does not begin with the magic number");
    }
    let (prefix, header_len) = match start[6] {
        1 => {
            let mut length = [0; 2];
            exact(&mut length)?;
            (10, usize::from(u16::from_le_bytes(length)))
        }
        2 | 3 => {
            let mut length = [0; 4];
            exact(&mut length)?;
            (12, u32::from_le_bytes(length) as usize)
        }
        version => return bad(format!("its format version {version} is unknown")),
    };
    if header_len > MAX_HEADER {
        return bad(format!("it claims a header of {header_len} bytes"));
    }
    let mut text = vec![0; header_len];
    exact(&mut text)?;
    let header = parse_header(&text)?;
    let there = size.saturating_sub((prefix + header_len) as u64);
    let wanted = header.dtype.bytes_of(&header.shape);
    if wanted.is_none_or(|n| n as u64 != there) {
        let Header { dtype, shape, .. } = &header;
        return bad(format!(
            "it is truncated or too long: {there} bytes do not make a {dtype} array of shape {shape:?}"
        ));
    }
    check(header.dtype, &header.shape).map_err(Fault::Unfit)?;
    let mut tensor =
        HostTensor::zeros(header.dtype, header.shape.clone()).map_err(|e| Fault::Damaged(e.to_string()))?;
    exact(tensor.bytes_mut())?;
    if header.big_endian {
        tensor.bytes_mut().chunks_exact_mut(header.dtype.size()).for_each(<[u8]>::reverse);
    }
    if header.dtype == DType::Bool {
        // Bytes other than 0 and 1 would be undefined behaviour in some runtimes.
        tensor.bytes_mut().iter_mut().for_each(|b| *b = u8::from(*b != 0));
    }
    if header.fortran_order { row_major(&tensor) } else { Ok(tensor) }
}

/// Converts a tensor from Fortran order (first dimension fastest) to C order (last dimension fastest).
fn row_major(tensor: &HostTensor) -> Result<HostTensor, Fault> {
    let (shape, size) = (tensor.shape(), tensor.dtype().size());
    let mut out =
        HostTensor::zeros(tensor.dtype(), shape.to_vec()).map_err(|e| Fault::Damaged(e.to_string()))?;
    let strides: Vec<usize> = shape
        .iter()
        .scan(1, |stride, dim| {
            let this = *stride;
            *stride *= dim;
            Some(this)
        })
        .collect();
    let mut index = vec![0; shape.len()];
    let mut from = 0;
    for element in out.bytes_mut().chunks_exact_mut(size) {
        element.copy_from_slice(&tensor.bytes()[from * size..][..size]);
        for axis in (0..shape.len()).rev() {
            index[axis] += 1;
            from += strides[axis];
            if index[axis] < shape[axis] {
                break;
            }
            from -= strides[axis] * shape[axis];
            index[axis] = 0;
        }
    }
    Ok(out)
}

/// Reads the dictionary, for example `{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }`: exactly
/// these three keys, in any order.
fn parse_header(text: &[u8]) -> Result<Header, Fault> {
    let Ok(text) = std::str::from_utf8(text) else { return bad("its header is not text") };
    let mut rest = Cursor(text);
    let (mut descr, mut fortran_order, mut shape) = (None, None, None);
    rest.expect("{")?;
    while !rest.take("}") {
        let key = rest.string()?;
        rest.expect(":")?;
        match key {
            "descr" => descr = Some(rest.descr()?),
            "fortran_order" => fortran_order = Some(rest.boolean()?),
            "shape" => shape = Some(rest.tuple()?),
            other => return bad(format!("its header has an unknown key {other:?}")),
        }
        if !rest.take(",") {
            rest.expect("}")?;
            break;
        }
    }
    if !rest.0.trim().is_empty() {
        return bad("there is text after its header's dictionary");
    }
    let (Some((dtype, big_endian)), Some(fortran_order), Some(shape)) = (descr, fortran_order, shape) else {
        return bad("its header lacks descr, fortran_order or shape");
    };
    Ok(Header { dtype, big_endian, fortran_order, shape })
}

/// The unread rest of a header.
struct Cursor<'a>(&'a str);

impl<'a> Cursor<'a> {
    fn take(&mut self, token: &str) -> bool {
        self.0 = self.0.trim_start();
        match self.0.strip_prefix(token) {
            Some(rest) => {
                self.0 = rest;
                true
            }
            None => false,
        }
    }

    fn expect(&mut self, token: &str) -> Result<(), Fault> {
        if self.take(token) {
            return Ok(());
        }
        let found: String = self.0.chars().take(12).collect();
        bad(format!("its header has {found:?} instead of {token:?}"))
    }

    fn string(&mut self) -> Result<&'a str, Fault> {
        let quote = if self.take("'") {
            '\''
        } else {
            self.expect("\"")?;
            '"'
        };
        match self.0.split_once(quote) {
            // numpy writes no escapes in headers of plain types.
            Some((string, rest)) if !string.contains('\\') => {
                self.0 = rest;
                Ok(string)
            }
            _ => bad("its header has a string that does not end"),
        }
    }

    fn boolean(&mut self) -> Result<bool, Fault> {
        if self.take("True") {
            return Ok(true);
        }
        self.expect("False").map(|()| false)
    }

    fn tuple(&mut self) -> Result<Vec<usize>, Fault> {
        self.expect("(")?;
        let mut dims = Vec::new();
        while !self.take(")") {
            self.0 = self.0.trim_start();
            let digits = self.0.find(|c: char| !c.is_ascii_digit()).unwrap_or(self.0.len());
            let Ok(dim) = self.0[..digits].parse() else { return bad("its shape is not a tuple of numbers") };
            self.0 = &self.0[digits..];
            // Python 2 wrote `3L`.
            self.take("L");
            dims.push(dim);
            if dims.len() > MAX_RANK {
                return bad(format!("it has more than {MAX_RANK} dimensions"));
            }
            if !self.take(",") {
                self.expect(")")?;
                break;
            }
        }
        Ok(dims)
    }

    /// Element type and whether it is big-endian.
    fn descr(&mut self) -> Result<(DType, bool), Fault> {
        self.0 = self.0.trim_start();
        if self.0.starts_with('[') {
            return Err(Fault::Unsupported("has a structured element type".into()));
        }
        let text = self.string()?;
        let kind = text.trim_start_matches(['<', '>', '=', '|']);
        let dtype =
            TYPES.iter().find(|(_, name)| *name == kind).map(|(dtype, _)| *dtype).ok_or_else(|| {
                Fault::Unsupported(format!("has elements of the unsupported type {text:?}"))
            })?;
        Ok((dtype, text.starts_with('>')))
    }
}

/// Our types by numpy's names: a kind and the bytes per element.
const TYPES: [(DType, &str); 12] = [
    (DType::F32, "f4"),
    (DType::F16, "f2"),
    (DType::F64, "f8"),
    (DType::Bool, "b1"),
    (DType::I8, "i1"),
    (DType::I16, "i2"),
    (DType::I32, "i4"),
    (DType::I64, "i8"),
    (DType::U8, "u1"),
    (DType::U16, "u2"),
    (DType::U32, "u4"),
    (DType::U64, "u8"),
];

/// Converts a tensor to a type that the format has; `None` if it already has one.
///
/// # Errors
/// `Unimplemented` for f8.
pub fn storable(name: &str, tensor: &HostTensor) -> Result<Option<HostTensor>, Error> {
    match tensor.dtype() {
        DType::BF16 => {
            let bytes: Vec<u8> =
                // The upper half of an f32 is the bf16.
                tensor.bytes().chunks_exact(2).flat_map(|b| [0, 0, b[0], b[1]]).collect();
            let wide = HostTensor::from_bytes(DType::F32, tensor.shape().to_vec(), &bytes);
            wide.map(Some).map_err(|e| Error::internal(e.to_string()))
        }
        dtype if TYPES.iter().any(|(known, _)| *known == dtype) => Ok(None),
        dtype => {
            Err(Error::unsupported(format!("cannot write {name:?}: NumPy files have no type for {dtype}")))
        }
    }
}

/// Writes a tensor of a type that the format has; see [`storable`].
///
/// # Errors
/// Errors of writing; `InvalidInput` for another type.
pub fn write_to(out: &mut dyn Write, tensor: &HostTensor) -> io::Result<()> {
    out.write_all(&header_of(tensor)?)?;
    out.write_all(tensor.bytes())
}

fn header_of(tensor: &HostTensor) -> io::Result<Vec<u8>> {
    let kind = TYPES
        .iter()
        .find(|(dtype, _)| *dtype == tensor.dtype())
        .map(|(_, kind)| *kind)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "NumPy files have no such type"))?;
    let order = if tensor.dtype().size() == 1 { '|' } else { '<' };
    let dims: Vec<String> = tensor.shape().iter().map(|d| format!("{d},")).collect();
    let mut text =
        format!("{{'descr': '{order}{kind}', 'fortran_order': False, 'shape': ({}), }}", dims.join(" "));
    // Pad with spaces up to the alignment, then a newline. A version 1 header is long enough for rank 64.
    let length = (10 + text.len() + 1).next_multiple_of(ALIGNMENT) - 10;
    text.extend(std::iter::repeat_n(' ', length - 1 - text.len()));
    text.push('\n');
    let mut header = MAGIC.to_vec();
    header.extend([1, 0]);
    header.extend((length as u16).to_le_bytes());
    header.extend(text.as_bytes());
    Ok(header)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    fn from(bytes: &[u8]) -> Result<HostTensor, String> {
        read_from(&mut &bytes[..], bytes.len() as u64, |_, _| Ok(()))
            .map_err(|f| f.of(Path::new("x.npy")).to_string())
    }
    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        let mut bytes = b"\x93NUMPY\x01\0".to_vec();
        bytes.extend((header.len() as u16).to_le_bytes());
        bytes.extend(header.as_bytes());
        bytes.extend(data);
        bytes
    }
    fn dict(descr: &str, fortran: &str, shape: &str) -> String {
        format!("{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}, }}")
    }
    /// A tensor of each type that the format has.
    pub(in crate::numpy) fn samples() -> Vec<HostTensor> {
        let bytes: Vec<u8> = (0..48).map(|b| b % 2).collect();
        TYPES
            .iter()
            .map(|(dtype, _)| {
                HostTensor::from_bytes(*dtype, vec![2, 1, 3], &bytes[..6 * dtype.size()]).unwrap()
            })
            .collect()
    }
    pub(in crate::numpy) fn same(a: &HostTensor, b: &HostTensor) -> bool {
        (a.dtype(), a.shape(), a.bytes()) == (b.dtype(), b.shape(), b.bytes())
    }

    #[test]
    fn every_type_comes_back() {
        for tensor in samples() {
            let mut bytes = Vec::new();
            write_to(&mut bytes, &tensor).unwrap();
            assert_eq!((bytes.len() - tensor.bytes().len()) % ALIGNMENT, 0);
            assert!(same(&from(&bytes).unwrap(), &tensor), "{tensor:?}");
        }
    }

    #[test]
    fn files_are_read_and_written_as_numpy_writes_them() {
        // np.save of np.arange(6, dtype='<i2').reshape(2, 3)
        let header = format!("{:<117}\n", dict("<i2", "False", "(2, 3)"));
        let data: Vec<u8> = (0..6i16).flat_map(i16::to_le_bytes).collect();
        let by_numpy = file(&header, &data);
        let tensor = from(&by_numpy).unwrap();
        assert_eq!((tensor.dtype(), tensor.shape(), tensor.bytes()), (DType::I16, &[2, 3][..], &data[..]));
        let mut by_us = Vec::new();
        write_to(&mut by_us, &tensor).unwrap();
        // numpy omits the last comma of the tuple, and pads for later growth.
        assert!(same(&from(&by_us).unwrap(), &tensor));
    }

    #[test]
    fn big_endian_and_fortran_order_are_converted() {
        let data: Vec<u8> = [0i32, 3, 1, 4, 2, 5].iter().flat_map(|v| v.to_be_bytes()).collect();
        let tensor = from(&file(&dict(">i4", "True", "(2L, 3L)"), &data)).unwrap();
        let expected: Vec<u8> = (0..6i32).flat_map(i32::to_le_bytes).collect();
        assert_eq!((tensor.shape(), tensor.bytes()), (&[2, 3][..], &expected[..]));
        // (2, 2, 2): element [i][j][k] lies at i + 2 j + 4 k.
        let tensor = from(&file(&dict("|u1", "True", "(2, 2, 2)"), &[0, 1, 2, 3, 4, 5, 6, 7])).unwrap();
        assert_eq!(tensor.bytes(), [0, 4, 2, 6, 1, 5, 3, 7]);
    }

    #[test]
    fn scalars_empty_arrays_and_odd_bools() {
        assert!(from(&file(&dict("<f4", "False", "()"), &1f32.to_le_bytes())).unwrap().shape().is_empty());
        assert_eq!(from(&file(&dict("<f4", "True", "(0, 5)"), &[])).unwrap().shape(), [0, 5]);
        assert_eq!(from(&file(&dict("|b1", "False", "(3,)"), &[0, 1, 200])).unwrap().bytes(), [0, 1, 1]);
    }

    #[test]
    fn bf16_is_widened_and_f8_refused() {
        let half: Vec<u8> =
            [1.0f32, -2.5].iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect();
        let tensor = HostTensor::from_bytes(DType::BF16, vec![2], &half).unwrap();
        let wide = storable("x", &tensor).unwrap().unwrap();
        assert_eq!(wide.to_f64().unwrap(), [1.0, -2.5]);
        let f8 = HostTensor::zeros(DType::F8E4M3, vec![2]).unwrap();
        assert!(storable("x", &f8).unwrap_err().message.contains("f8e4m3"));
    }

    #[test]
    fn faults_are_reported() {
        let good = file(&dict("<f4", "False", "(2,)"), &[0; 8]);
        for cut in 0..good.len() {
            assert!(from(&good[..cut]).unwrap_err().contains("truncated"), "{cut}");
        }
        let longer = [&good[..], &[0]].concat();
        let mut huge = b"\x93NUMPY\x02\0".to_vec();
        huge.extend(u32::MAX.to_le_bytes());
        for (bytes, words) in [
            (longer, "too long"),
            (huge, "claims a header of 4294967295 bytes"),
            (b"not a npy file".to_vec(), "begin"),
            (b"\x93NUMPY\x07\0aaaa".to_vec(), "version 7"),
            (file(&dict("<f4", "False", "(4611686018427387904, 4)"), &[]), "bytes do not make"),
            (file(&dict("<f4", "False", "(99999999999999999999,)"), &[]), "tuple"),
            (file(&dict("<f4", "False", "(-1,)"), &[]), "tuple"),
            (file(&dict("<f4", "Maybe", "(1,)"), &[]), "Maybe"),
            (file(&dict("<c16", "False", "(1,)"), &[0; 16]), "c16"),
            (file(&dict("|O", "False", "(1,)"), &[0; 8]), "\"|O\""),
            (file(&dict("|V2", "False", "(1,)"), &[0; 2]), "V2"),
            (file("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}", &[0; 4]), "structured"),
            (file("{'descr': '<f4', 'shape': (1,)}", &[0; 4]), "lacks"),
            (file("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'x': 1}", &[0; 4]), "unknown key"),
            (file("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} + x", &[0; 4]), "after"),
            (file(&dict("<f4", "False", &format!("({})", "1, ".repeat(65))), &[0; 4]), "64 dimensions"),
            (file(&"[".repeat(60_000), &[]), "instead of \"{\""),
        ] {
            let error = from(&bytes).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }

    proptest! {
        #[test]
        fn any_header_is_read_without_panic(header in "[{}()\\[\\]'\":,<>|0-9a-zL_ ]{0,80}", data in any::<[u8; 8]>()) {
            let _ = from(&file(&header, &data));
        }

        #[test]
        fn changed_files_are_read_without_panic(edits in prop::collection::vec((0usize..80, any::<u8>()), 1..5)) {
            let mut bytes = file(&dict("<f4", "True", "(1, 2)"), &[0; 8]);
            for (at, byte) in edits {
                let at = at % bytes.len();
                bytes[at] = byte;
            }
            let _ = from(&bytes);
        }
    }
}

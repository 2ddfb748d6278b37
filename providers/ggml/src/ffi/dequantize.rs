//! ggml's own decoders of quantized rows, as a reference for tests.

use super::files::{LIBRARY_DIR, library_file, open};
use std::path::Path;

/// `void dequantize_row_TYPE(const void * blocks, float * values, int64_t count)`, of `ggml-quants.h`.
type Decoder = unsafe extern "C" fn(*const u8, *mut f32, i64);

/// Decodes whole blocks of a type, for example `q4_K`, of `bytes` bytes and `elements` elements each.
pub(crate) fn dequantize_row(name: &str, blocks: &[u8], bytes: usize, elements: usize) -> Vec<f32> {
    assert!(blocks.len().is_multiple_of(bytes));
    let count = blocks.len() / bytes * elements;
    let mut values = vec![0f32; count];
    let folder = std::path::absolute(Path::new(LIBRARY_DIR)).unwrap();
    let library = open(&folder.join(library_file("ggml-base"))).unwrap();
    let symbol = format!("dequantize_row_{name}\0");
    // SAFETY: functions of this name have this signature in the version of ggml that the build script compiles.
    let decode = unsafe { library.get::<Decoder>(symbol.as_bytes()) }.unwrap();
    // ggml reads blocks as structures, whose alignment is at most that of f32.
    let mut aligned = vec![0u64; blocks.len().div_ceil(8)];
    let source = aligned.as_mut_ptr().cast::<u8>();
    // SAFETY: `source` has room for all blocks. The decoder reads all `count / elements` of them and writes `count` values.
    unsafe {
        source.copy_from_nonoverlapping(blocks.as_ptr(), blocks.len());
        decode(source, values.as_mut_ptr(), count as i64);
    }
    values
}

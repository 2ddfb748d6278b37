//! Runs kernels inside a ggml graph, as nodes of type `GGML_OP_CUSTOM`.

use super::{
    api::*,
    kernel::{Grid, Inputs, Kernel, MAX_INPUTS, Tile},
    tensor::Type,
};
use crate::simd::lines::NoMemory;
use sdrun_abi::{Error, ErrorCode};
use std::{
    any::Any,
    ffi::{c_int, c_void},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

/// The error that ended a run early.
#[derive(Default)]
pub(super) struct Failure {
    set: AtomicBool,
    error: Mutex<Option<Error>>,
}

impl Failure {
    pub(super) fn is_set(&self) -> bool {
        self.set.load(Ordering::Relaxed)
    }
    fn record(&self, error: Error) {
        self.error.lock().unwrap_or_else(|p| p.into_inner()).get_or_insert(error);
        self.set.store(true, Ordering::Relaxed);
    }
    /// Returns the first error since the last call.
    pub(super) fn take(&self) -> Option<Error> {
        self.set.store(false, Ordering::Relaxed);
        self.error.lock().unwrap_or_else(|p| p.into_inner()).take()
    }
}

/// A kernel with its state. ggml keeps a pointer to it as user data.
pub(super) struct Cell {
    pub(super) kernel: Box<dyn Kernel>,
    /// The name of the operation, for messages.
    pub(super) name: String,
    pub(super) inputs: usize,
    pub(super) failure: std::sync::Arc<Failure>,
    pub(super) shares: Shares,
    /// The number of workers of the first run, and the grid for it. Later runs nearly always have as many.
    pub(super) grid: OnceLock<(usize, Grid)>,
    /// Whether it overwrites its input 0. Set before the first run.
    pub(super) over: AtomicBool,
}

impl Cell {
    fn grid(&self, workers: usize) -> Grid {
        let (known, grid) = self.grid.get_or_init(|| (workers, self.kernel.grid(workers)));
        if *known == workers { *grid } else { self.kernel.grid(workers) }
    }
}

/// The most shares that tiles are divided into.
const MAX_SHARES: usize = 64;

/// A share of consecutive tiles for each worker. A worker that has finished its own share takes tiles from the others, so that none
/// waits long for a slower core. Results do not depend on which worker computes a tile.
#[derive(Debug)]
pub(super) struct Shares([AtomicUsize; MAX_SHARES]);

impl Default for Shares {
    fn default() -> Self {
        Shares([const { AtomicUsize::new(0) }; MAX_SHARES])
    }
}

impl Shares {
    /// Gives all tiles back. Must not run while workers take tiles.
    pub(super) fn reset(&self) {
        self.0.iter().for_each(|taken| taken.store(0, Ordering::Relaxed));
    }

    /// Yields tiles for worker `ith` of `nth` until none of `tiles` is left.
    pub(super) fn take(&self, tiles: usize, ith: usize, nth: usize) -> impl Iterator<Item = usize> {
        let count = nth.min(MAX_SHARES);
        (0..count).flat_map(move |turn| {
            let share = (ith + turn) % count;
            let (first, end) = (tiles * share / count, tiles * (share + 1) / count);
            std::iter::from_fn(move || {
                let index = first + self.0[share].fetch_add(1, Ordering::Relaxed);
                (index < end).then_some(index)
            })
        })
    }
}

/// Runs tiles of a kernel for worker `ith` of `nth`. ggml calls it for nodes of `Builder::custom`.
///
/// # Safety
/// `data` is the node's `Cell`. `dst` and its sources are allocated and contiguous. They do not overlap, except that `dst` is the
/// memory of its first source if `over` is set.
pub(super) unsafe extern "C" fn trampoline(dst: TensorPtr, ith: c_int, nth: c_int, data: *mut c_void) {
    // SAFETY: by this function's contract.
    let cell = unsafe { &*data.cast::<Cell>() };
    if cell.failure.is_set() {
        return;
    }
    let share = AssertUnwindSafe(|| {
        // SAFETY: by this function's contract.
        unsafe { work(cell, dst, ith as usize, nth as usize) }
    });
    match catch_unwind(share) {
        Ok(Ok(())) => {}
        Ok(Err(why)) => cell.failure.record(Error::invalid(format!("{}: {why}", cell.name))),
        Err(panic) => cell.failure.record(match panic.downcast_ref::<NoMemory>() {
            Some(NoMemory { bytes }) => {
                let message = format!("{}: cannot allocate {bytes} bytes of scratch memory", cell.name);
                Error::new(ErrorCode::ResourceExhausted, message)
                    .with_hint("close other programs, or use fewer threads")
            }
            None => Error::invalid(format!("{}: panic: {}", cell.name, panic_text(&*panic))),
        }),
    }
}

/// # Safety
/// As [`trampoline`].
unsafe fn work(cell: &Cell, dst: TensorPtr, ith: usize, nth: usize) -> Result<(), String> {
    let over = cell.over.load(Ordering::Relaxed);
    let mut slots: [(Type, &[u8]); MAX_INPUTS] = [(Type::F32, &[]); MAX_INPUTS];
    // An input that is written over must not be borrowed for reading too.
    for (i, slot) in slots.iter_mut().enumerate().take(cell.inputs).skip(usize::from(over)) {
        // SAFETY: `Builder::custom` set this many sources; they are contiguous and allocated.
        unsafe {
            let source = &*(*dst).src[i];
            let type_ = Type::from_raw(source.type_).ok_or("a source has an unknown type")?;
            let len = source.ne.iter().product::<i64>() as usize * type_.size();
            *slot = (type_, std::slice::from_raw_parts(source.data.cast::<u8>(), len));
        }
    }
    let inputs = Inputs::new(slots, cell.inputs, over);
    // SAFETY: by this function's contract.
    let (data, type_, len) =
        unsafe { ((*dst).data.cast::<u8>(), (*dst).type_, (*dst).ne.iter().product::<i64>()) };
    let type_ = Type::from_raw(type_).ok_or("the output has an unknown type")?;
    let grid = cell.grid(nth);
    if grid.len() != len as usize {
        return Err(format!("a grid of {} elements for an output of {len}", grid.len()));
    }
    let tiles = grid.tiles();
    for index in cell.shares.take(tiles, ith, nth) {
        if cell.failure.is_set() {
            return Ok(());
        }
        // SAFETY: the output has the grid's elements, and `shares` hands out each tile once.
        let tile = unsafe { Tile::of_output(data, type_, grid, index) };
        cell.kernel.tile(&inputs, tile)?;
    }
    Ok(())
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tile_is_taken_once() {
        for (tiles, workers) in [(0, 1), (1, 2), (100, 1), (100, 3), (1000, 100)] {
            let shares = Shares::default();
            for _ in 0..2 {
                shares.reset();
                let all = std::sync::Mutex::new(Vec::new());
                std::thread::scope(|scope| {
                    for ith in 0..workers {
                        let (all, shares) = (&all, &shares);
                        scope.spawn(move || {
                            let mine: Vec<usize> = shares.take(tiles, ith, workers).collect();
                            all.lock().unwrap().extend(mine);
                        });
                    }
                });
                let mut all = all.into_inner().unwrap();
                all.sort_unstable();
                assert!(all.into_iter().eq(0..tiles), "{tiles} tiles, {workers} workers");
            }
        }
    }
}

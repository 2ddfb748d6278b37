//! Runs a kernel on threads, without ggml, and computes how threads would share the work of a graph.

use super::{
    Builder,
    custom::Shares,
    kernel::{Inputs, Kernel, MAX_INPUTS, Tile},
    tensor::Type,
};
use crate::simd::as_bytes;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The address of an output that several threads write.
struct Filled(*mut u8);

// SAFETY: each tile is computed once, and tiles of a grid do not overlap.
unsafe impl Sync for Filled {}

/// Returns the output of a kernel for inputs of f32 or other 32-bit words. `workers` threads share its tiles, in an order that
/// differs for each number of workers.
pub(crate) fn run_kernel(kernel: &dyn Kernel, inputs: &[&[u32]], workers: usize) -> Vec<u32> {
    let mut slots: [(Type, &[u8]); MAX_INPUTS] = [(Type::F32, &[]); MAX_INPUTS];
    for (slot, words) in slots.iter_mut().zip(inputs) {
        slot.1 = as_bytes(words);
    }
    let inputs = Inputs::new(slots, inputs.len(), false);
    let grid = kernel.grid(workers);
    // An element that no tile writes stays a NaN.
    let mut out = vec![f32::NAN.to_bits(); grid.len()];
    let mut order: Vec<usize> = (0..grid.tiles()).collect();
    // Fisher-Yates, with the numbers of Knuth's MMIX generator.
    let mut state = workers as u64;
    for last in (1..order.len()).rev() {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        order.swap(last, (state >> 33) as usize % (last + 1));
    }
    let (next, filled) = (AtomicUsize::new(0), Filled(out.as_mut_ptr().cast()));
    let start = std::sync::Barrier::new(workers);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                let filled: &Filled = &filled;
                start.wait();
                while let Some(index) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                    // SAFETY: the output has the grid's elements, and `next` hands out each tile once.
                    let tile = unsafe { Tile::of_output(filled.0, Type::F32, grid, *index) };
                    kernel.tile(&inputs, tile).unwrap();
                }
            });
        }
    });
    out
}

/// What an element of the output costs on top of its multiplications, in multiplications.
const ELEMENT: f64 = 16.0;
/// What it costs to start a node on all threads and to wait for the last one: about 2 microseconds at 60 multiplications a nanosecond.
const NODE: f64 = 1.2e5;

/// How long our nodes of a graph take on threads of these speeds, with the work divided as in a real run. A thread of speed 1 takes 1 for
/// a multiplication.
pub(crate) fn simulated_time(builder: &Builder, speeds: &[f64]) -> f64 {
    let workers = speeds.len();
    let time = |kernel: &dyn Kernel| {
        let grid = kernel.grid(workers);
        let of_element = kernel.multiplications() as f64 / grid.len() as f64 + ELEMENT;
        let cost = |index: usize| {
            let (_, rows, cols) = grid.tile(index);
            let elements = (rows.len() * cols.len()) as f64;
            elements * of_element + kernel.repeated([rows.len(), cols.len()]) as f64
        };
        let shares = Shares::default();
        let mut tiles: Vec<_> = (0..workers).map(|ith| shares.take(grid.tiles(), ith, workers)).collect();
        let (mut clocks, mut done) = (vec![0.0; workers], 0.0f64);
        // The thread that is free first takes the next tile.
        while let Some(first) = (0..workers)
            .filter(|i| clocks[*i] < f64::INFINITY)
            .min_by(|a, b| clocks[*a].total_cmp(&clocks[*b]))
        {
            match tiles[first].next() {
                Some(index) => clocks[first] += cost(index) / speeds[first],
                None => {
                    done = done.max(clocks[first]);
                    clocks[first] = f64::INFINITY;
                }
            }
        }
        done + if workers > 1 { NODE } else { 0.0 }
    };
    builder.kernels.iter().map(|cell| time(&*cell.kernel)).sum()
}

mod tests {
    use super::*;
    use crate::ffi::Grid;

    /// A wrong kernel that keeps state between tiles: it writes the order in which they are computed.
    struct Turns(AtomicUsize);

    impl Kernel for Turns {
        fn grid(&self, _: usize) -> Grid {
            Grid::flat(64, 1)
        }
        fn tile(&self, _: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
            tile.row(0).fill(self.0.fetch_add(1, Ordering::Relaxed) as f32);
            Ok(())
        }
    }

    #[test]
    fn a_kernel_whose_tiles_depend_on_their_order_is_seen() {
        let turns = |workers| run_kernel(&Turns(AtomicUsize::new(0)), &[], workers);
        assert_eq!(turns(1), turns(1));
        assert_ne!(turns(1), turns(3));
    }
}

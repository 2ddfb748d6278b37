//! Runs a kernel on threads, without ggml.

use super::{
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

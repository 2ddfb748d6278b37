//! Products of bf16 pairs in tiles of 16 x 16, AMX: a block is two by two tiles of the result.
//!
//! The instructions are those of chapter "Advanced Matrix Extensions" of Intel's manual for software developers. Rust has no
//! stable intrinsics for them.

use super::{
    product::{Block, Left, Product, ROW_STRIDE, Start, TILE},
    variant,
};
use std::{arch::asm, cell::Cell, sync::OnceLock};

/// Rows and columns of a block.
pub(super) const BLOCK: usize = 2 * TILE;

/// Whether this processor has tiles of bf16 and the system lets this process use them.
pub(super) fn usable() -> bool {
    static USABLE: OnceLock<bool> = OnceLock::new();
    *USABLE.get_or_init(|| {
        const BF16: u32 = 1 << 22;
        const TILES: u32 = 1 << 24;
        let features = std::arch::x86_64::__cpuid_count(7, 0).edx;
        features & BF16 != 0 && features & TILES != 0 && variant::unlimited() && permitted()
    })
}

/// Asks Linux for the state of the tiles, which each process has to (`Documentation/arch/x86/xstate.rst`).
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: changes nothing but what this process may use.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// What `ldtilecfg` reads.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes_of_a_row: [u16; 16],
    rows: [u8; 16],
}

/// All eight tiles are whole.
static SHAPES: Shapes = Shapes {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    bytes_of_a_row: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

thread_local! {
    static IN_USE: Cell<bool> = const { Cell::new(false) };
}

/// As long as it lives its thread has tiles: setting them up for each block would cost a part of its time.
pub(super) struct Tiles(());

impl Tiles {
    /// `None` where the thread has them already, or the processor has none.
    pub(super) fn set_up() -> Option<Self> {
        if !usable() || IN_USE.replace(true) {
            return None;
        }
        // SAFETY: the processor has tiles and the process may use them; nobody else on this thread does meanwhile, for what is
        // called as long as they are in use is ours.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const SHAPES, options(nostack, readonly)) };
        Some(Tiles(()))
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
        IN_USE.set(false);
    }
}

/// The loop over the depth. `$line`s take tiles 4 and 5 from one operand and 6 and 7 from the other and multiply them into tiles 0
/// to 3. rdi is where the tap begins, rdx bytes from row to row; r8 and r10 are where the other operand's tiles do, r9
/// bytes from row to row.
macro_rules! sum {
    ($walk:ident: $($line:literal)*) => {
        asm!(
            "2:",
            "mov edi, dword ptr [rax]",
            "lea rdi, [rcx + 4*rdi]",
            $($line,)*
            "add r8, r11",
            "add r10, r11",
            "add rax, 64",
            "dec rsi",
            "jnz 2b",
            inout("rax") $walk.taps => _,
            inout("rsi") $walk.count => _,
            inout("r8") $walk.dense[0] => _,
            inout("r10") $walk.dense[1] => _,
            in("r9") $walk.dense_row,
            in("r11") $walk.dense_step,
            in("rcx") $walk.tapped,
            in("rdx") $walk.tapped_row,
            out("rdi") _,
            options(nostack, readonly),
        )
    };
}

/// How the operands are walked through, [`TILE`] steps at a time; distances in bytes.
struct Walk {
    /// The operand that taps lead through, whether it is the left one, and the taps.
    tapped: *const u32,
    tapped_left: bool,
    tapped_row: usize,
    taps: *const u32,
    /// The two tiles of the other one.
    dense: [*const u32; 2],
    dense_row: usize,
    dense_step: usize,
    count: usize,
}

/// # Safety
/// The level is [`usable`]; [`Product::into`] has checked the lengths.
pub(super) unsafe fn block(product: &Product<'_>, out: &mut Block<'_>) {
    let _tiles = Tiles::set_up();
    let (taps, tap_step) = product.taps.of_tiles();
    // From the first tile of the operand without taps to its second, from row to row of it, from step to step.
    let [second, row, step] = match product.left {
        Left::Rows => [TILE * ROW_STRIDE, ROW_STRIDE, TILE],
        Left::Columns(_) | Left::Tiles => [TILE * TILE, TILE, TILE * BLOCK],
        Left::Taps => [TILE, BLOCK, TILE * BLOCK],
    };
    let tapped_left = product.left == Left::Taps;
    let (tapped, dense) = if tapped_left { (product.a, product.b) } else { (product.b, product.a) };
    let walk = Walk {
        tapped: tapped.as_ptr(),
        tapped_left,
        tapped_row: 4 * if tapped_left { TILE } else { tap_step },
        taps: taps.as_ptr(),
        dense: [dense.as_ptr(), dense.as_ptr().wrapping_add(second)],
        dense_row: 4 * row,
        dense_step: 4 * step,
        count: product.depth / TILE,
    };
    let add = product.start == Start::Output;
    let (rows, cols) = out.size();
    let size = (rows > TILE, cols > TILE);
    if rows.is_multiple_of(TILE) && cols.is_multiple_of(TILE) {
        let (data, stride) = out.raw();
        // SAFETY: by this function's contract; the output is whole tiles.
        unsafe { multiply(walk, size, add, data, stride) };
        return;
    }
    let mut whole = Whole([0.0; BLOCK * BLOCK]);
    let whole = &mut whole.0;
    if add {
        (0..rows).for_each(|row| whole[row * BLOCK..][..cols].copy_from_slice(out.row(row)));
    }
    // SAFETY: by this function's contract.
    unsafe { multiply(walk, size, add, whole.as_mut_ptr(), BLOCK) };
    (0..rows).for_each(|row| out.row(row).copy_from_slice(&whole[row * BLOCK..][..cols]));
}

/// The tiles of a block.
#[repr(align(64))]
struct Whole([f32; BLOCK * BLOCK]);

/// # Safety
/// The thread has tiles; `data`, its rows `stride` elements apart, is one tile or, where it is `tall` or `wide`, two or four; the left
/// operand has rows, and the right one columns, for all of them.
unsafe fn multiply(walk: Walk, (tall, wide): (bool, bool), add: bool, data: *mut f32, stride: usize) {
    let stride = 4 * stride;
    let below = data.wrapping_byte_add(TILE * stride);
    // SAFETY: by this function's contract.
    unsafe {
        if add {
            asm!("tileloadd tmm0, [{} + {}]", in(reg) data, in(reg) stride, options(nostack, readonly));
            if wide {
                asm!("tileloadd tmm1, [{} + {} + 64]", in(reg) data, in(reg) stride, options(nostack, readonly));
            }
            if tall {
                asm!("tileloadd tmm2, [{} + {}]", in(reg) below, in(reg) stride, options(nostack, readonly));
            }
            if tall && wide {
                asm!("tileloadd tmm3, [{} + {} + 64]", in(reg) below, in(reg) stride, options(nostack, readonly));
            }
        } else {
            asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem));
        }
        match (walk.tapped_left, tall, wide) {
            (false, true, true) => sum!(walk:
                "tileloadd tmm4, [r8 + r9]"
                "tileloadd tmm6, [rdi + rdx]"
                "tileloadd tmm7, [rdi + rdx + 64]"
                "tdpbf16ps tmm0, tmm4, tmm6"
                "tileloadd tmm5, [r10 + r9]"
                "tdpbf16ps tmm1, tmm4, tmm7"
                "tdpbf16ps tmm2, tmm5, tmm6"
                "tdpbf16ps tmm3, tmm5, tmm7"),
            (false, true, false) => sum!(walk:
                "tileloadd tmm4, [r8 + r9]"
                "tileloadd tmm6, [rdi + rdx]"
                "tileloadd tmm5, [r10 + r9]"
                "tdpbf16ps tmm0, tmm4, tmm6"
                "tdpbf16ps tmm2, tmm5, tmm6"),
            (false, false, true) => sum!(walk:
                "tileloadd tmm4, [r8 + r9]"
                "tileloadd tmm6, [rdi + rdx]"
                "tileloadd tmm7, [rdi + rdx + 64]"
                "tdpbf16ps tmm0, tmm4, tmm6"
                "tdpbf16ps tmm1, tmm4, tmm7"),
            (false, false, false) => sum!(walk:
                "tileloadd tmm4, [r8 + r9]"
                "tileloadd tmm6, [rdi + rdx]"
                "tdpbf16ps tmm0, tmm4, tmm6"),
            // The second tile begins 16 rows of 64 bytes after the first.
            (true, true, true) => sum!(walk:
                "tileloadd tmm4, [rdi + rdx]"
                "tileloadd tmm6, [r8 + r9]"
                "tileloadd tmm7, [r10 + r9]"
                "tdpbf16ps tmm0, tmm4, tmm6"
                "tileloadd tmm5, [rdi + rdx + 1024]"
                "tdpbf16ps tmm1, tmm4, tmm7"
                "tdpbf16ps tmm2, tmm5, tmm6"
                "tdpbf16ps tmm3, tmm5, tmm7"),
            (true, true, false) => sum!(walk:
                "tileloadd tmm4, [rdi + rdx]"
                "tileloadd tmm6, [r8 + r9]"
                "tileloadd tmm5, [rdi + rdx + 1024]"
                "tdpbf16ps tmm0, tmm4, tmm6"
                "tdpbf16ps tmm2, tmm5, tmm6"),
            (true, false, true) => sum!(walk:
                "tileloadd tmm4, [rdi + rdx]"
                "tileloadd tmm6, [r8 + r9]"
                "tileloadd tmm7, [r10 + r9]"
                "tdpbf16ps tmm0, tmm4, tmm6"
                "tdpbf16ps tmm1, tmm4, tmm7"),
            (true, false, false) => sum!(walk:
                "tileloadd tmm4, [rdi + rdx]"
                "tileloadd tmm6, [r8 + r9]"
                "tdpbf16ps tmm0, tmm4, tmm6"),
        }
        asm!("tilestored [{} + {}], tmm0", in(reg) data, in(reg) stride, options(nostack));
        if wide {
            asm!("tilestored [{} + {} + 64], tmm1", in(reg) data, in(reg) stride, options(nostack));
        }
        if tall {
            asm!("tilestored [{} + {}], tmm2", in(reg) below, in(reg) stride, options(nostack));
        }
        if tall && wide {
            asm!("tilestored [{} + {} + 64], tmm3", in(reg) below, in(reg) stride, options(nostack));
        }
    }
}

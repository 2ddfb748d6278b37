//! Products of bf16 pairs in 16 x 16 tiles (AMX). A block is two by two tiles of the result.
//!
//! Intel's manual for software developers documents the instructions in the chapter "Advanced Matrix Extensions". Rust has no
//! stable intrinsics for them.

use super::operands::{Block, Left, Product, ROW_STRIDE, Start, TILE};
use crate::simd::level::AMX_BLOCK;
use std::arch::asm;

/// Rows and columns of a block.
const BLOCK: usize = 2 * TILE;
const _: () = assert!(AMX_BLOCK.0 == BLOCK && AMX_BLOCK.1 == BLOCK);

/// The operand of `ldtilecfg`.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes_of_a_row: [u16; 16],
    rows: [u8; 16],
}

/// Eight tiles of 16 rows of 64 bytes.
static SHAPES: Shapes = Shapes {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    bytes_of_a_row: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// The path through the operands, [`TILE`] steps at a time. Distances are in bytes.
struct Walk {
    /// The operand that taps index, whether it is the left one, and the taps.
    tapped: *const u32,
    tapped_left: bool,
    tapped_row: usize,
    taps: *const u32,
    /// The two tiles of the other operand.
    dense: [*const u32; 2],
    dense_row: usize,
    dense_step: usize,
    count: usize,
}

/// # Safety
/// The level has tiles; [`Product::into`] has checked the lengths.
pub(super) unsafe fn block(product: &Product<'_>, out: &mut Block<'_>) {
    let (taps, tap_step) = (&product.taps.offsets, product.taps.in_tiles.unwrap_or(0) as usize);
    // Of the operand without taps: words from its first tile to the second, from row to row, from step to step.
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
    let (rows, cols) = (out.rows, out.cols);
    let size = (rows > TILE, cols > TILE);
    if rows.is_multiple_of(TILE) && cols.is_multiple_of(TILE) {
        // SAFETY: by this function's contract; the output is whole tiles.
        unsafe { multiply(walk, size, Output { data: out.data, row: 4 * out.stride, add }) };
        return;
    }
    let mut whole = Whole([0.0; BLOCK * BLOCK]);
    let whole = &mut whole.0;
    if add {
        (0..rows).for_each(|row| whole[row * BLOCK..][..cols].copy_from_slice(out.row(row)));
    }
    let output = Output { data: whole.as_mut_ptr(), row: 4 * BLOCK, add };
    // SAFETY: by this function's contract.
    unsafe { multiply(walk, size, output) };
    (0..rows).for_each(|row| out.row(row).copy_from_slice(&whole[row * BLOCK..][..cols]));
}

/// The tiles of a block.
#[repr(align(64))]
struct Whole([f32; BLOCK * BLOCK]);

/// One `asm!` block that configures the tiles, computes, and releases them. No tile register or configuration outlives it, because
/// neither the compiler nor other code on the thread knows of them.
///
/// Each `load` and `store` names one tile of the result. `sum` loads tiles 4 and 5 from the left operand and 6 and 7 from the right
/// one, and multiplies them into tiles 0 to 3. Registers:
/// * rdi: the tap's tile; rdx: bytes from row to row;
/// * r8, r10: the tiles of the other operand; r9: bytes from row to row;
/// * r12: the result; r15: its second row of tiles; r13: bytes from row to row.
macro_rules! tiles {
    ($walk:ident, $out:ident, load: [$($load:literal)*], sum: [$($sum:literal)*], store: [$($store:literal)*]) => {
        asm!(
            "ldtilecfg [r15]",
            "mov r15, r13",
            "shl r15, 4",
            "add r15, r12",
            "test r14, r14",
            "jz 2f",
            $($load,)*
            "jmp 3f",
            "2:",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "3:",
            "test rsi, rsi",
            "jz 5f",
            "4:",
            "mov edi, dword ptr [rax]",
            "lea rdi, [rcx + 4*rdi]",
            $($sum,)*
            "add r8, r11",
            "add r10, r11",
            "add rax, 64",
            "dec rsi",
            "jnz 4b",
            "5:",
            $($store,)*
            "tilerelease",
            inout("rax") $walk.taps => _,
            inout("rsi") $walk.count => _,
            inout("r8") $walk.dense[0] => _,
            inout("r10") $walk.dense[1] => _,
            in("r9") $walk.dense_row,
            in("r11") $walk.dense_step,
            in("rcx") $walk.tapped,
            in("rdx") $walk.tapped_row,
            out("rdi") _,
            in("r12") $out.data,
            in("r13") $out.row,
            in("r14") usize::from($out.add),
            inout("r15") &raw const SHAPES => _,
            out("tmm0") _,
            out("tmm1") _,
            out("tmm2") _,
            out("tmm3") _,
            out("tmm4") _,
            out("tmm5") _,
            out("tmm6") _,
            out("tmm7") _,
            options(nostack),
        )
    };
}

/// The destination: its first element, bytes from row to row, and whether the sums are added to its contents.
struct Output {
    data: *mut f32,
    row: usize,
    add: bool,
}

/// # Safety
/// The processor has bf16 tiles and the process may use them. The output is one tile, or two or four if it is `tall` or `wide`. The
/// operands have rows and columns for all of them.
unsafe fn multiply(walk: Walk, (tall, wide): (bool, bool), out: Output) {
    // SAFETY: by this function's contract, and `Walk` describes the operands, whose lengths were checked.
    unsafe {
        match (walk.tapped_left, tall, wide) {
            (false, true, true) => tiles!(walk, out,
            load: [
                "tileloadd tmm0, [r12 + r13]"
                "tileloadd tmm1, [r12 + r13 + 64]"
                "tileloadd tmm2, [r15 + r13]"
                "tileloadd tmm3, [r15 + r13 + 64]"
            ],
            sum: [
                "tileloadd tmm4, [r8 + r9]"
                "tileloadd tmm6, [rdi + rdx]"
                "tileloadd tmm7, [rdi + rdx + 64]"
                "tdpbf16ps tmm0, tmm4, tmm6"
                "tileloadd tmm5, [r10 + r9]"
                "tdpbf16ps tmm1, tmm4, tmm7"
                "tdpbf16ps tmm2, tmm5, tmm6"
                "tdpbf16ps tmm3, tmm5, tmm7"
            ],
            store: [
                "tilestored [r12 + r13], tmm0"
                "tilestored [r12 + r13 + 64], tmm1"
                "tilestored [r15 + r13], tmm2"
                "tilestored [r15 + r13 + 64], tmm3"
            ]),
            (false, true, false) => tiles!(walk, out,
                load: ["tileloadd tmm0, [r12 + r13]" "tileloadd tmm2, [r15 + r13]"],
                sum: [
                    "tileloadd tmm4, [r8 + r9]"
                    "tileloadd tmm6, [rdi + rdx]"
                    "tileloadd tmm5, [r10 + r9]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tdpbf16ps tmm2, tmm5, tmm6"
                ],
                store: ["tilestored [r12 + r13], tmm0" "tilestored [r15 + r13], tmm2"]),
            (false, false, true) => tiles!(walk, out,
                load: ["tileloadd tmm0, [r12 + r13]" "tileloadd tmm1, [r12 + r13 + 64]"],
                sum: [
                    "tileloadd tmm4, [r8 + r9]"
                    "tileloadd tmm6, [rdi + rdx]"
                    "tileloadd tmm7, [rdi + rdx + 64]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tdpbf16ps tmm1, tmm4, tmm7"
                ],
                store: ["tilestored [r12 + r13], tmm0" "tilestored [r12 + r13 + 64], tmm1"]),
            (false, false, false) => tiles!(walk, out,
                load: ["tileloadd tmm0, [r12 + r13]"],
                sum: [
                    "tileloadd tmm4, [r8 + r9]"
                    "tileloadd tmm6, [rdi + rdx]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                ],
                store: ["tilestored [r12 + r13], tmm0"]),
            // The second tile is 16 rows of 64 bytes after the first.
            (true, true, true) => tiles!(walk, out,
            load: [
                "tileloadd tmm0, [r12 + r13]"
                "tileloadd tmm1, [r12 + r13 + 64]"
                "tileloadd tmm2, [r15 + r13]"
                "tileloadd tmm3, [r15 + r13 + 64]"
            ],
            sum: [
                "tileloadd tmm4, [rdi + rdx]"
                "tileloadd tmm6, [r8 + r9]"
                "tileloadd tmm7, [r10 + r9]"
                "tdpbf16ps tmm0, tmm4, tmm6"
                "tileloadd tmm5, [rdi + rdx + 1024]"
                "tdpbf16ps tmm1, tmm4, tmm7"
                "tdpbf16ps tmm2, tmm5, tmm6"
                "tdpbf16ps tmm3, tmm5, tmm7"
            ],
            store: [
                "tilestored [r12 + r13], tmm0"
                "tilestored [r12 + r13 + 64], tmm1"
                "tilestored [r15 + r13], tmm2"
                "tilestored [r15 + r13 + 64], tmm3"
            ]),
            (true, true, false) => tiles!(walk, out,
                load: ["tileloadd tmm0, [r12 + r13]" "tileloadd tmm2, [r15 + r13]"],
                sum: [
                    "tileloadd tmm4, [rdi + rdx]"
                    "tileloadd tmm6, [r8 + r9]"
                    "tileloadd tmm5, [rdi + rdx + 1024]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tdpbf16ps tmm2, tmm5, tmm6"
                ],
                store: ["tilestored [r12 + r13], tmm0" "tilestored [r15 + r13], tmm2"]),
            (true, false, true) => tiles!(walk, out,
                load: ["tileloadd tmm0, [r12 + r13]" "tileloadd tmm1, [r12 + r13 + 64]"],
                sum: [
                    "tileloadd tmm4, [rdi + rdx]"
                    "tileloadd tmm6, [r8 + r9]"
                    "tileloadd tmm7, [r10 + r9]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tdpbf16ps tmm1, tmm4, tmm7"
                ],
                store: ["tilestored [r12 + r13], tmm0" "tilestored [r12 + r13 + 64], tmm1"]),
            (true, false, false) => tiles!(walk, out,
                load: ["tileloadd tmm0, [r12 + r13]"],
                sum: [
                    "tileloadd tmm4, [rdi + rdx]"
                    "tileloadd tmm6, [r8 + r9]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                ],
                store: ["tilestored [r12 + r13], tmm0"]),
        }
    }
}

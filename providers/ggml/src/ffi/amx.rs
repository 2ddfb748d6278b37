//! Products of bf16 pairs in tiles of 16 x 16, AMX: a block is two by two tiles of the result.
//!
//! The instructions are those of chapter "Advanced Matrix Extensions" of Intel's manual for software developers. Rust has no
//! stable intrinsics for them.

use super::{
    product::{Block, Left, Product, ROW_STRIDE, Start, TILE},
    variant,
};
use std::{arch::asm, sync::OnceLock};

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

/// Requests the state of the tiles from Linux, as each process must (`Documentation/arch/x86/xstate.rst`).
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call changes nothing but what this process may use.
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
        unsafe { multiply(walk, size, Output { data, row: 4 * stride, add }) };
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

/// One `asm!` that sets the tiles up, computes, and releases them, so that no tile register and no tile configuration lives
/// outside of it: the compiler and whatever else runs on the thread know nothing of them.
///
/// Each `load` and each `store` names one tile of the result; `sum` takes tiles 4 and 5 from the left operand and 6 and 7 from the
/// right one and multiplies them into tiles 0 to 3. For them rdi is where the tap begins, rdx bytes from row to row; r8 and r10
/// are where the tiles of the other operand begin, r9 bytes from row to row. The result begins at r12, its second row of tiles at
/// r15, r13 bytes from row to row.
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

/// Where the result goes: its first element, bytes from row to row, and whether the sums are added to what is there.
struct Output {
    data: *mut f32,
    row: usize,
    add: bool,
}

/// # Safety
/// The processor has tiles of bf16 and the process may use them; the output is one tile or, where it is `tall` or `wide`, two or
/// four; the left operand has rows, and the right one columns, for all of them.
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
            // The second tile begins 16 rows of 64 bytes after the first.
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

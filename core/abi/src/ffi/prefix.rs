//! Extensible structs: reads and writes the part that both sides know.

use crate::{Error, Result};

/// A struct of the ABI that can grow.
///
/// # Safety
/// The struct is `repr(C)`, its first field is `struct_size: u32`, and all bytes zero are a valid value.
pub unsafe trait Prefixed: Copy {
    /// Size of the struct in version 1.0, in bytes. Both sides know at least this part.
    const FIRST: usize;
}

/// The size that the struct states.
///
/// # Safety
/// `from` points to a struct that starts with its size.
unsafe fn size_at<T: Prefixed>(from: *const T) -> usize {
    // SAFETY: guaranteed by the caller, and that of `Prefixed`.
    unsafe { from.cast::<u32>().read() as usize }
}

/// Copies the part of the struct at `from` that both sides know; the remaining fields are zero. `None` for null.
///
/// # Safety
/// `from` is null or points to at least `struct_size` readable bytes.
pub unsafe fn read<T: Prefixed>(from: *const T) -> Option<T> {
    if from.is_null() {
        return None;
    }
    let mut known = std::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: guaranteed by the caller. At most `size_of::<T>()` bytes are copied, and zero is valid for the rest.
    unsafe {
        let len = size_at(from).min(size_of::<T>());
        std::ptr::copy_nonoverlapping(from.cast::<u8>(), known.as_mut_ptr().cast::<u8>(), len);
        Some(known.assume_init())
    }
}

/// As [`read`], but fails if the struct is null or shorter than in version 1.0. `what` names it in the error.
///
/// # Safety
/// As [`read`].
pub unsafe fn read_whole<T: Prefixed>(what: &str, from: *const T) -> Result<T> {
    // SAFETY: guaranteed by the caller.
    let size = if from.is_null() { None } else { Some(unsafe { size_at(from) }) };
    match size {
        None => Err(Error::invalid(format!("{what} is null"))),
        Some(size) if size < T::FIRST => {
            Err(Error::invalid(format!("{what} has {size} bytes but needs at least {}", T::FIRST)))
        }
        // SAFETY: guaranteed by the caller.
        Some(_) => unsafe { read(from) }.ok_or_else(|| Error::invalid(format!("{what} is null"))),
    }
}

/// Writes the part of `value` that both sides know to the struct at `to`. The target keeps its `struct_size`.
///
/// # Safety
/// `to` points to at least `struct_size` writable bytes.
pub unsafe fn write<T: Prefixed>(to: *mut T, value: &T) {
    let head = size_of::<u32>();
    // SAFETY: guaranteed by the caller. Both structs are at least as long as the copy.
    unsafe {
        let len = size_at(to).min(size_of::<T>());
        if len > head {
            let from = (&raw const *value).cast::<u8>().add(head);
            std::ptr::copy_nonoverlapping(from, to.cast::<u8>().add(head), len - head);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Version 1.0 of a struct, and its successor.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Old {
        struct_size: u32,
        a: u32,
    }
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct New {
        struct_size: u32,
        a: u32,
        b: u64,
    }
    // SAFETY: plain integers; the first is the size.
    unsafe impl Prefixed for Old {
        const FIRST: usize = 8;
    }
    // SAFETY: as above.
    unsafe impl Prefixed for New {
        const FIRST: usize = 8;
    }

    #[test]
    fn either_side_may_be_older() {
        let (old, new) = (Old { struct_size: 8, a: 1 }, New { struct_size: 16, a: 2, b: 3 });
        // SAFETY: both structs state their true size.
        unsafe {
            assert_eq!(read::<New>((&raw const old).cast()), Some(New { struct_size: 8, a: 1, b: 0 }));
            assert_eq!(read::<Old>((&raw const new).cast()), Some(Old { struct_size: 16, a: 2 }));
            assert_eq!(read::<Old>(std::ptr::null()), None);
            // The write stays inside the receiver's struct.
            let mut room = [Old { struct_size: 8, a: 0 }, Old { struct_size: 0xdead, a: 0xbeef }];
            write::<New>(room.as_mut_ptr().cast(), &new);
            assert_eq!(room, [Old { struct_size: 8, a: 2 }, Old { struct_size: 0xdead, a: 0xbeef }]);
            let mut room = New { struct_size: 16, a: 0, b: 7 };
            write::<Old>((&raw mut room).cast(), &Old { struct_size: 8, a: 9 });
            assert_eq!(room, New { struct_size: 16, a: 9, b: 7 });
        }
    }

    #[test]
    fn structs_shorter_than_version_1_0_are_refused() {
        let short = Old { struct_size: 4, a: 1 };
        // SAFETY: the stated size is smaller than the true size.
        let error = unsafe { read_whole("the struct", &raw const short) }.unwrap_err();
        assert_eq!(error.message, "the struct has 4 bytes but needs at least 8");
        // SAFETY: null is allowed.
        assert!(unsafe { read_whole::<Old>("it", std::ptr::null()) }.unwrap_err().message.contains("null"));
    }
}

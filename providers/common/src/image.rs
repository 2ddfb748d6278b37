use sdrun_abi::{Error, ErrorCode, Result};
use std::{
    fs::File,
    io::{ErrorKind, Read, Seek, SeekFrom},
    path::Path,
};

/// Minimum size of a shared library. Anything shorter is a stand-in, such as a linker script.
const LEAST_BYTES: u64 = 4096;

/// Checks that a file looks like a whole shared library for this machine, without running any of it.
///
/// Linux's dynamic loader maps a library by its program headers and does not compare them with the file's size, so
/// a truncated library kills the process with SIGBUS instead of returning an error. For ELF files, this function
/// therefore checks the machine and the extent of every segment. The loaders of Windows and macOS check the extent
/// themselves, so only the file type is checked there.
///
/// `DataLoss` if the file is not a library or is truncated; `FailedPrecondition` if it is for another
/// processor architecture.
pub fn check_image(file: &Path) -> Result<()> {
    let io = |e: &std::io::Error| Error::io("read the library", file, e);
    let metadata = std::fs::metadata(file).map_err(|e| io(&e))?;
    let refuse = |code: ErrorCode, why: &str| {
        Err(Error::new(code, format!("{} {why}", file.display()))
            .with_file(file)
            .with_hint("install the runtime again"))
    };
    if !metadata.is_file() {
        return refuse(ErrorCode::DataLoss, "is not a regular file");
    }
    if metadata.len() < LEAST_BYTES {
        return refuse(
            ErrorCode::DataLoss,
            &format!("is no shared library: it has only {} bytes", metadata.len()),
        );
    }
    let mut open = File::open(file).map_err(|e| io(&e))?;
    let mut header = [0u8; 64];
    open.read_exact(&mut header).map_err(|e| io(&e))?;
    let verdict = if cfg!(windows) {
        (&header[..2] != b"MZ").then_some((ErrorCode::DataLoss, "is no Windows library".to_string()))
    } else if cfg!(target_vendor = "apple") {
        let magic = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
        // A 64-bit Mach-O file, or a "fat" one with several architectures (big-endian magic).
        (!matches!(magic, 0xfeed_facf | 0xbeba_feca | 0xbfba_feca))
            .then_some((ErrorCode::DataLoss, "is no Mach-O library".to_string()))
    } else {
        match elf_segments(&header) {
            Err(verdict) => Some(verdict),
            Ok(table) => {
                // At most 65535 entries of 56 bytes.
                let mut bytes = vec![0u8; table.entries * PROGRAM_HEADER];
                let read = open.seek(SeekFrom::Start(table.offset)).and_then(|_| open.read_exact(&mut bytes));
                let end = match read {
                    Ok(()) => elf_end(&bytes),
                    // No file reaches so far.
                    Err(e) if matches!(e.kind(), ErrorKind::UnexpectedEof | ErrorKind::InvalidInput) => {
                        u64::MAX
                    }
                    Err(e) => return Err(io(&e)),
                };
                (end > metadata.len()).then(|| {
                    (ErrorCode::DataLoss, format!("is truncated: it ends at byte {}", metadata.len()))
                })
            }
        }
    };
    match verdict {
        None => Ok(()),
        Some((code, why)) => refuse(code, &why),
    }
}

/// Size of an `Elf64_Phdr`.
const PROGRAM_HEADER: usize = 56;

/// Where an ELF file's program headers are.
struct SegmentTable {
    offset: u64,
    entries: usize,
}

/// Reads an `Elf64_Ehdr` (System V ABI, "ELF Header"): a little-endian 64-bit library for this processor.
fn elf_segments(header: &[u8; 64]) -> Result<SegmentTable, (ErrorCode, String)> {
    let u16_at = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
    let not_elf = |why: &str| Err((ErrorCode::DataLoss, why.to_string()));
    if &header[..4] != b"\x7fELF" {
        return not_elf("is no ELF library");
    }
    // EI_CLASS 2: 64 bit; EI_DATA 1: little-endian; e_type 3: shared object.
    if header[4] != 2 || header[5] != 1 || u16_at(16) != 3 {
        return not_elf("is an ELF file, but no 64-bit little-endian shared library");
    }
    let machine = match std::env::consts::ARCH {
        "x86_64" => Some(62),
        "aarch64" => Some(183),
        "riscv64" => Some(243),
        _ => None,
    };
    if machine.is_some_and(|machine| machine != u16_at(18)) {
        let arch = std::env::consts::ARCH;
        return Err((
            ErrorCode::FailedPrecondition,
            format!("is built for another processor architecture than {arch}"),
        ));
    }
    if u16_at(54) as usize != PROGRAM_HEADER || u16_at(56) == 0 {
        return not_elf("is an ELF file without valid program headers");
    }
    let offset = u64::from_le_bytes(std::array::from_fn(|i| header[32 + i]));
    Ok(SegmentTable { offset, entries: u16_at(56) as usize })
}

/// The end of the last segment in the file, out of an array of `Elf64_Phdr`.
fn elf_end(headers: &[u8]) -> u64 {
    let u64_at = |header: &[u8], at: usize| u64::from_le_bytes(std::array::from_fn(|i| header[at + i]));
    headers
        .chunks_exact(PROGRAM_HEADER)
        // p_offset + p_filesz
        .map(|h| u64_at(h, 8).saturating_add(u64_at(h, 32)))
        .max()
        .unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn error(bytes: &[u8]) -> Error {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("library");
        std::fs::write(&file, bytes).unwrap();
        check_image(&file).unwrap_err()
    }

    #[test]
    fn what_is_no_library_is_refused() {
        assert!(error(b"").message.contains("only 0 bytes"));
        assert!(error(b"GROUP ( libthing.so.1 )").message.contains("no shared library"));
        let garbage: Vec<u8> =
            (0..100_000u32).flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
        assert_eq!(error(&garbage).code, ErrorCode::DataLoss);
        let dir = tempfile::tempdir().unwrap();
        assert!(check_image(dir.path()).unwrap_err().message.contains("not a regular file"));
        let gone = check_image(&dir.path().join("gone")).unwrap_err();
        assert_eq!(gone.code, ErrorCode::NotFound);
        assert!(gone.message.contains("gone"));
    }

    /// This process's C library: a complete library that always exists.
    #[cfg(target_os = "linux")]
    fn libc() -> Vec<u8> {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let path = maps
            .lines()
            .filter_map(|line| line.split_whitespace().last())
            .find(|path| path.contains("/libc.so") || path.contains("/libc-") || path.contains("/ld-musl"))
            .expect("a dynamically linked test");
        std::fs::read(path).unwrap()
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_truncated_or_foreign_library_is_refused() {
        let whole = libc();
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("libc.so");
        std::fs::write(&file, &whole).unwrap();
        check_image(&file).unwrap();
        for part in [whole.len() / 2, whole.len() / 4, LEAST_BYTES as usize] {
            let error = error(&whole[..part]);
            assert!(error.message.contains("truncated"), "{error}");
            assert_eq!(error.code, ErrorCode::DataLoss);
        }
        let mut foreign = whole.clone();
        foreign[18] = 8; // MIPS
        foreign[19] = 0;
        assert_eq!(error(&foreign).code, ErrorCode::FailedPrecondition);
        let mut narrow = whole;
        narrow[4] = 1;
        assert!(error(&narrow).message.contains("64-bit"));
    }

    proptest! {
        #[test]
        fn no_header_panics(header in any::<[u8; 64]>(), table in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut elf = header;
            elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
            let _ = elf_segments(&header);
            let _ = elf_segments(&elf);
            let _ = elf_end(&table);
        }
    }
}

//! Engines as bytes: a mark, the length of a description as a little-endian u32, the description as JSON, and what the runtime wrote.

use sdrun_abi::{Error, ErrorCode, Result};
use serde::{Serialize, de::DeserializeOwned};

/// A buffer with everything but what the runtime wrote, for which it has this much room. `mark` says which provider wrote the engine and in
/// which format.
///
/// # Errors
/// `Internal` for a description that is no JSON or longer than 4 GiB.
pub fn begin(mark: &[u8; 8], description: &impl Serialize, room: usize) -> Result<Vec<u8>> {
    let json =
        serde_json::to_vec(description).map_err(|e| Error::internal(format!("cannot write JSON: {e}")))?;
    let length = u32::try_from(json.len())
        .map_err(|_| Error::internal("the description of the engine is longer than 4 GiB"))?;
    let mut payload = Vec::with_capacity(mark.len() + 4 + json.len() + room);
    payload.extend_from_slice(mark);
    payload.extend_from_slice(&length.to_le_bytes());
    payload.extend_from_slice(&json);
    Ok(payload)
}

/// Splits what [`begin`] has written and what was added to it.
///
/// # Errors
/// `DataLoss` for anything else, and if there is nothing after the description.
pub fn split<'a, T: DeserializeOwned>(mark: &[u8; 8], payload: &'a [u8]) -> Result<(T, &'a [u8])> {
    let rest = payload.strip_prefix(mark).ok_or_else(|| damaged("it is not one of this provider's"))?;
    let (length, rest) = rest.split_first_chunk::<4>().ok_or_else(|| damaged("it ends in its header"))?;
    let (json, written) = rest
        .split_at_checked(u32::from_le_bytes(*length) as usize)
        .ok_or_else(|| damaged("its description is longer than the engine"))?;
    let description =
        serde_json::from_slice(json).map_err(|e| damaged(&format!("its description is not JSON: {e}")))?;
    match written.is_empty() {
        true => Err(damaged("it ends after its description")),
        false => Ok((description, written)),
    }
}

/// The error for an engine that was changed or cut off.
pub fn damaged(why: &str) -> Error {
    Error::new(ErrorCode::DataLoss, format!("the engine is damaged: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MARK: &[u8; 8] = b"SDRTEST1";

    #[test]
    fn a_damaged_payload_is_an_error() {
        let read = |payload: &[u8]| {
            split::<String>(MARK, payload).map(|(description, written)| (description, written.to_vec()))
        };
        let mut good = begin(MARK, &"described", 4).unwrap();
        good.extend_from_slice(b"blob");
        assert_eq!(read(&good).unwrap(), ("described".to_string(), b"blob".to_vec()));
        for end in 0..=good.len() - 4 {
            assert_eq!(read(&good[..end]).unwrap_err().code, ErrorCode::DataLoss, "{end}");
        }
        let mut long = good.clone();
        long[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(read(&long).unwrap_err().message.contains("longer"));
        let mut garbage = good.clone();
        garbage[12] = b'?';
        assert!(read(&garbage).unwrap_err().message.contains("JSON"));
        assert!(split::<String>(b"SDRTEST2", &good).is_err());
    }
}

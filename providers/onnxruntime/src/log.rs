//! ONNX Runtime logs from any thread at any time, but the host accepts records only during its calls. So records are
//! buffered until the current or the next call ends.

use ort::logging::LogLevel as OrtLevel;
use sdrun_abi::{Host, LogLevel};
use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicBool, Ordering::Relaxed},
};

/// Maximum number of buffered records; further ones are dropped. A warning for each node of a large model would not
/// help anybody.
const LIMIT: usize = 200;

struct Waiting {
    records: Vec<(LogLevel, String)>,
    dropped: usize,
}

static WAITING: Mutex<Waiting> = Mutex::new(Waiting { records: Vec::new(), dropped: 0 });
/// Whether records are buffered. Lets a run skip the lock if there are none.
static ANY: AtomicBool = AtomicBool::new(false);

/// Buffers a record of at least warning level.
pub(crate) fn record(level: OrtLevel, message: &str) {
    let level = match level {
        OrtLevel::Verbose | OrtLevel::Info => return,
        OrtLevel::Warning => LogLevel::Warn,
        OrtLevel::Error | OrtLevel::Fatal => LogLevel::Error,
    };
    let mut waiting = WAITING.lock().unwrap_or_else(PoisonError::into_inner);
    match waiting.records.len() < LIMIT {
        true => waiting.records.push((level, message.trim_end().to_string())),
        false => waiting.dropped += 1,
    }
    ANY.store(true, Relaxed);
}

/// Passes all buffered records to the host.
pub(crate) fn deliver(host: &dyn Host) {
    if !ANY.swap(false, Relaxed) {
        return;
    }
    let (records, dropped) = {
        let mut waiting = WAITING.lock().unwrap_or_else(PoisonError::into_inner);
        (std::mem::take(&mut waiting.records), std::mem::take(&mut waiting.dropped))
    };
    for (level, message) in records {
        host.log(level, "onnxruntime", &message);
    }
    if dropped > 0 {
        host.log(LogLevel::Warn, "onnxruntime", &format!("{dropped} more records were dropped"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdrun_abi::Flow;

    #[derive(Default)]
    struct Listener(Mutex<Vec<(LogLevel, String)>>);

    impl Host for Listener {
        fn log(&self, level: LogLevel, target: &str, message: &str) {
            assert_eq!(target, "onnxruntime");
            self.0.lock().unwrap().push((level, message.to_string()));
        }
        fn progress(&self, _: &str, _: u64, _: u64) -> Flow {
            Flow::Continue
        }
        fn cancelled(&self) -> bool {
            false
        }
    }

    #[test]
    fn records_are_delivered_once_and_bounded() {
        record(OrtLevel::Info, "quiet");
        record(OrtLevel::Warning, "careful\n");
        record(OrtLevel::Fatal, "bad");
        for _ in 0..LIMIT {
            record(OrtLevel::Error, "again");
        }
        let listener = Listener::default();
        deliver(&listener);
        let records = std::mem::take(&mut *listener.0.lock().unwrap());
        assert_eq!(records[0], (LogLevel::Warn, "careful".to_string()));
        assert_eq!(records[1], (LogLevel::Error, "bad".to_string()));
        assert_eq!(records.len(), LIMIT + 1);
        assert!(records[LIMIT].1.starts_with("2 more"));
        deliver(&listener);
        assert!(listener.0.lock().unwrap().is_empty());
    }
}

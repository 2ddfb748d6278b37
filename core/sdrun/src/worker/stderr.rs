//! A worker's stderr: the last part is kept for error messages, and everything goes to the log.

use std::{
    collections::VecDeque,
    io::{BufRead, BufReader, Read},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// Number of bytes kept.
const KEPT: usize = 64 << 10;
/// Longer lines are split at this length, in bytes.
const LINE: u64 = 8 << 10;
/// Number of lines that an error quotes.
const WORDS_LINES: usize = 5;
const WORDS_CHARS: usize = 600;

/// The last lines; a thread that runs [`follow`](Tail::follow) fills it.
pub(super) struct Tail {
    /// A line that the worker writes before it reports a failure; not kept.
    mark: String,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    lines: VecDeque<String>,
    bytes: usize,
    /// Total number of lines, kept or not.
    seen: u64,
    marks: u64,
    closed: bool,
}

impl Tail {
    pub(super) fn new(mark: String) -> Self {
        Tail { mark, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Reads until the worker and all processes that inherited its stderr have closed it.
    pub(super) fn follow(&self, stderr: impl Read, pid: u32) {
        let mut stderr = BufReader::new(stderr);
        let mut line = Vec::new();
        loop {
            line.clear();
            match stderr.by_ref().take(LINE).read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => break,
                Ok(_) => self.add(&line, pid),
            }
        }
        self.state().closed = true;
        self.changed.notify_all();
    }

    fn add(&self, line: &[u8], pid: u32) {
        let text: String =
            String::from_utf8_lossy(line).chars().filter(|c| !c.is_control() || *c == '\t').collect();
        let mut state = self.state();
        if text == self.mark {
            state.marks += 1;
            self.changed.notify_all();
        } else if !text.is_empty() {
            tracing::debug!(target: "sdrun::worker", pid, "{text}");
            state.seen += 1;
            state.bytes += text.len();
            state.lines.push_back(text);
            while state.bytes > KEPT {
                let Some(first) = state.lines.pop_front() else { break };
                state.bytes -= first.len();
            }
        }
    }

    /// Lines seen so far.
    pub(super) fn seen(&self) -> u64 {
        self.state().seen
    }

    /// The kept text.
    pub(super) fn text(&self) -> String {
        Vec::from(self.state().lines.clone()).join("\n")
    }

    /// The last few lines after the first `since`.
    pub(super) fn last_words(&self, since: u64) -> Option<String> {
        let state = self.state();
        let fresh = usize::try_from(state.seen - since.min(state.seen)).unwrap_or(usize::MAX);
        let lines: Vec<&str> =
            state.lines.iter().rev().take(fresh.min(WORDS_LINES)).map(|line| line.trim()).collect();
        let text = lines.into_iter().rev().collect::<Vec<_>>().join(" | ");
        let cut = text.chars().count().saturating_sub(WORDS_CHARS);
        let text: String = text.chars().skip(cut).collect();
        (!text.is_empty()).then_some(text)
    }

    /// Waits until `marks` marks have arrived or the stream has ended.
    pub(super) fn wait_for_mark(&self, marks: u64, limit: Duration) {
        self.wait(limit, |state| state.marks >= marks || state.closed);
    }

    /// Waits until stderr is closed.
    pub(super) fn wait_for_end(&self, limit: Duration) {
        self.wait(limit, |state| state.closed);
    }

    fn wait(&self, limit: Duration, done: impl Fn(&State) -> bool) {
        let _ = self.changed.wait_timeout_while(self.state(), limit, |state| !done(state));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(text: &[u8]) -> Tail {
        let tail = Tail::new("the mark".into());
        tail.follow(text, 1);
        tail
    }

    #[test]
    fn keeps_the_last_64_kib_whatever_comes() {
        let mut text = vec![b'x'; 3 * KEPT];
        text.extend(b"\nlast \xff line without newline");
        let tail = after(&text);
        assert!(tail.text().len() <= KEPT && tail.text().len() > KEPT / 2);
        assert!(tail.text().ends_with("last \u{fffd} line without newline"));
    }

    #[test]
    fn last_words_belong_to_the_call() {
        let tail = after(b"old\nnew 1\r\n\n\x1b[1mnew 2\nthe mark\n");
        assert_eq!(tail.seen(), 3);
        assert_eq!(tail.last_words(1).unwrap(), "new 1 | [1mnew 2");
        assert_eq!(tail.last_words(3), None);
        assert_eq!(tail.last_words(99), None);
        assert_eq!(tail.state().marks, 1);
    }

    #[test]
    fn last_words_are_few() {
        let text: String = (0..100).map(|i| format!("{i} {}\n", "ä".repeat(200))).collect();
        let words = after(text.as_bytes()).last_words(0).unwrap();
        assert_eq!(words.chars().count(), WORDS_CHARS);
        assert!(words.contains("99 ä") && !words.contains("95 ä"));
    }
}

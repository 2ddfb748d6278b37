//! What a provider passed and failed when somebody last looked, kept in the repository.

use super::{Failure, Outcomes};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

/// Characters of a long reason that are kept: who says it, and the end, where vendors name the culprit.
const HEAD: usize = 60;
const TAIL: usize = 100;
/// Begins the reason of a test that killed the provider's process.
const CRASH: &str = "crash: ";

/// `PROVIDER.passes.txt` (names) and `PROVIDER.expected-failures.txt` (name, tab, reason), sorted.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    passes: BTreeSet<String>,
    failures: BTreeMap<String, String>,
}

/// Outcomes next to a snapshot.
#[derive(Debug, Default)]
pub struct Report {
    /// Number of tests that passed.
    pub passed: usize,
    /// Number of failures that were expected.
    pub expected: usize,
    /// What must not be: name, and what happened.
    pub regressions: Vec<(String, String)>,
    /// Passes that the snapshot has as failures.
    pub improvements: Vec<String>,
}

impl Snapshot {
    fn files(dir: &Path, provider: &str) -> (PathBuf, PathBuf) {
        (dir.join(format!("{provider}.passes.txt")), dir.join(format!("{provider}.expected-failures.txt")))
    }

    /// Reads the snapshot of a provider; an empty one where there is none.
    pub fn read(dir: &Path, provider: &str) -> io::Result<Self> {
        let (passes, failures) = Self::files(dir, provider);
        let text = |path: &Path| match fs::read_to_string(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(String::new()),
            other => other,
        };
        let split =
            |line: &str| line.split_once('\t').map(|(name, reason)| (name.to_string(), reason.to_string()));
        Ok(Snapshot {
            passes: text(&passes)?.lines().map(str::to_string).collect(),
            failures: text(&failures)?.lines().filter_map(split).collect(),
        })
    }

    /// The snapshot that these outcomes make.
    pub fn of(outcomes: &Outcomes) -> Self {
        let mut snapshot = Snapshot::default();
        for (name, outcome) in outcomes {
            match outcome {
                Ok(()) => drop(snapshot.passes.insert(name.clone())),
                Err(failure) => drop(snapshot.failures.insert(name.clone(), recorded(failure))),
            }
        }
        snapshot
    }

    /// Writes both files.
    pub fn write(&self, dir: &Path, provider: &str) -> io::Result<()> {
        let (passes, failures) = Self::files(dir, provider);
        fs::create_dir_all(dir)?;
        fs::write(passes, self.passes.iter().map(|name| format!("{name}\n")).collect::<String>())?;
        fs::write(
            failures,
            self.failures.iter().map(|(name, why)| format!("{name}\t{why}\n")).collect::<String>(),
        )
    }

    /// Judges outcomes. A regression is a test that passed before, one that is in neither file, one that now
    /// crashes the provider, and, where `complete`, one that is in a file and was not run.
    pub fn judge(&self, outcomes: &Outcomes, complete: bool) -> Report {
        let mut report = Report::default();
        for (name, outcome) in outcomes {
            match (outcome, self.failures.get(name)) {
                (Ok(()), expected) => {
                    report.passed += 1;
                    if expected.is_some() {
                        report.improvements.push(name.clone());
                    }
                }
                (Err(failure), Some(expected)) if !failure.crashed || expected.starts_with(CRASH) => {
                    report.expected += 1;
                }
                (Err(failure), Some(_)) => {
                    report.regressions.push((name.clone(), format!("{CRASH}{}", failure.detail)));
                }
                (Err(failure), None) if self.passes.contains(name) => {
                    report.regressions.push((name.clone(), failure.detail.clone()));
                }
                (Err(failure), None) => {
                    report.regressions.push((name.clone(), format!("not recorded yet: {}", failure.detail)));
                }
            }
        }
        if complete {
            for name in
                self.passes.iter().chain(self.failures.keys()).filter(|name| !outcomes.contains_key(*name))
            {
                report.regressions.push((name.clone(), "recorded, but there is no such test".into()));
            }
        }
        report
    }
}

fn recorded(failure: &Failure) -> String {
    if failure.crashed { format!("{CRASH}{}", failure.reason) } else { failure.reason.clone() }
}

/// An error text as it can stand in a snapshot: one line, not too long, without what changes from run to run
/// (temporary folders, process ids, addresses).
pub(super) fn shorten(text: &str) -> String {
    let mut words = Vec::new();
    for word in text.split_whitespace() {
        let changes =
            word.contains("0x") || word.contains("/tmp") || word.contains(".cpp:") || word.contains(".cc:");
        words.push(if changes { "…" } else { word });
    }
    words.dedup();
    let line: Vec<char> = words.join(" ").chars().collect();
    if line.len() <= HEAD + TAIL {
        return line.into_iter().collect();
    }
    line[..HEAD].iter().chain(&['…']).chain(&line[line.len() - TAIL..]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(reason: &str, crashed: bool) -> Result<(), Failure> {
        Err(Failure { crashed, ..Failure::new(reason) })
    }

    fn outcomes(list: &[(&str, Result<(), Failure>)]) -> Outcomes {
        list.iter().map(|(name, outcome)| (name.to_string(), outcome.clone())).collect()
    }

    #[test]
    fn survives_the_files() {
        let dir = tempfile::tempdir().unwrap();
        let before = Snapshot::of(&outcomes(&[
            ("a", Ok(())),
            ("b", failure("why", false)),
            ("c", failure("died", true)),
        ]));
        before.write(dir.path(), "p").unwrap();
        assert_eq!(
            fs::read_to_string(dir.path().join("p.expected-failures.txt")).unwrap(),
            "b\twhy\nc\tcrash: died\n"
        );
        assert_eq!(Snapshot::read(dir.path(), "p").unwrap(), before);
        assert_eq!(Snapshot::read(dir.path(), "other").unwrap(), Snapshot::default());
    }

    #[test]
    fn tells_regressions_from_improvements() {
        let old = [
            ("a", Ok(())),
            ("b", Ok(())),
            ("c", failure("why", false)),
            ("d", failure("why", false)),
            ("e", Ok(())),
        ];
        let snapshot = Snapshot::of(&outcomes(&old));
        let now = [
            ("a", Ok(())),
            ("b", failure("now wrong", false)),
            ("c", failure("another reason", false)),
            ("d", Ok(())),
            ("new", failure("x", false)),
        ];
        let report = snapshot.judge(&outcomes(&now), true);
        assert_eq!((report.passed, report.expected), (2, 1));
        assert_eq!(report.improvements, ["d"]);
        let names: Vec<&str> = report.regressions.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["b", "new", "e"]);
        assert_eq!(snapshot.judge(&outcomes(&now[..1]), false).regressions.len(), 0);
    }

    #[test]
    fn a_new_crash_is_a_regression_and_an_old_one_is_not() {
        let snapshot = Snapshot::of(&outcomes(&[("a", failure("why", false)), ("b", failure("died", true))]));
        let report =
            snapshot.judge(&outcomes(&[("a", failure("died", true)), ("b", failure("died", true))]), true);
        assert_eq!(report.expected, 1);
        assert_eq!(report.regressions, [("a".to_string(), "crash: died".to_string())]);
    }

    #[test]
    fn reasons_are_short_and_stable() {
        assert_eq!(shorten("a\n  b at 0x7ffe, /tmp/x/y: bad"), "a b at … bad");
        let long = shorten(&format!("begin {} end", "ü".repeat(500)));
        assert_eq!(long.chars().count(), HEAD + 1 + TAIL);
        assert!(long.starts_with("begin ") && long.ends_with(" end"));
    }
}

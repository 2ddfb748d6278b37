//! The recorded passes and failures of a provider, kept in the repository.

use super::{Failure, Outcomes};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

/// Number of characters kept at both ends of a long reason. It starts with the source; vendors name the culprit at the end.
const HEAD: usize = 60;
const TAIL: usize = 100;
/// The header of a file of expected failures.
const HEADER: &str = "\
# Each line is `name: class | reason`. The class says where a test fails and how, as STAGE/KIND.
#   STAGE  test (the runner cannot feed it), open (reading the model), build, session, run, outputs (they differ)
#   KIND   outputs: wrong-values, wrong-shape, wrong-type, missing, random (ONNX does not define the values), rounding (bytes
#          that differ by one), saturated (infinities that became the largest number of a type);
#          test: not-tensors, element-type, broken;
#          other stages: the code of the error, such as unimplemented, invalid-argument or internal;
#          crash (the process of the provider died or its plugin panicked); timeout
# A test whose class changes is a regression, the same as a test that fails and is not in the list.
# The reason is for readers and is not compared. Rewrite the file with `sdrun-conformance --bless`.
";

/// A failure as stored in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Expected {
    class: String,
    reason: String,
}

/// `PROVIDER.passes.txt` (names) and `PROVIDER.expected-failures.txt` (its header says how), sorted by name.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    passes: BTreeSet<String>,
    failures: BTreeMap<String, Expected>,
}

/// Results compared with a snapshot.
#[derive(Debug, Default)]
pub struct Report {
    /// Number of tests that passed.
    pub passed: usize,
    /// Number of failures that were expected.
    pub expected: usize,
    /// Names of tests that fail unexpectedly or in another way, and what happened.
    pub regressions: Vec<(String, String)>,
    /// Passed tests that the snapshot records as failures.
    pub improvements: Vec<String>,
}

impl Snapshot {
    fn files(dir: &Path, provider: &str) -> (PathBuf, PathBuf) {
        (dir.join(format!("{provider}.passes.txt")), dir.join(format!("{provider}.expected-failures.txt")))
    }

    /// Reads the snapshot of a provider. Returns an empty one if there is none.
    pub fn read(dir: &Path, provider: &str) -> io::Result<Self> {
        let (passes, failures) = Self::files(dir, provider);
        let text = |path: &Path| match fs::read_to_string(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(String::new()),
            other => other,
        };
        let mut snapshot =
            Snapshot { passes: text(&passes)?.lines().map(str::to_string).collect(), ..Snapshot::default() };
        for line in text(&failures)?.lines().filter(|line| !line.starts_with('#')) {
            let (name, expected) = parse(line).ok_or_else(|| {
                let what = format!("{}: `{line}` is not `name: class | reason`", failures.display());
                io::Error::new(io::ErrorKind::InvalidData, what)
            })?;
            snapshot.failures.insert(name, expected);
        }
        Ok(snapshot)
    }

    /// The snapshot for these results.
    pub fn of(outcomes: &Outcomes) -> Self {
        let mut snapshot = Snapshot::default();
        for (name, outcome) in outcomes {
            match outcome {
                Ok(()) => drop(snapshot.passes.insert(name.clone())),
                Err(Failure { class, reason, .. }) => {
                    let expected = Expected { class: class.clone(), reason: reason.clone() };
                    snapshot.failures.insert(name.clone(), expected);
                }
            }
        }
        snapshot
    }

    /// Writes both files.
    pub fn write(&self, dir: &Path, provider: &str) -> io::Result<()> {
        let (passes, failures) = Self::files(dir, provider);
        fs::create_dir_all(dir)?;
        fs::write(passes, self.passes.iter().map(|name| format!("{name}\n")).collect::<String>())?;
        let lines = self.failures.iter();
        let lines = lines.map(|(name, Expected { class, reason })| format!("{name}: {class} | {reason}\n"));
        fs::write(failures, HEADER.to_string() + &lines.collect::<String>())
    }

    /// Judges results. A regression is a failed test that passed before, that is in neither file, or that fails in another way than
    /// recorded. If `complete`, a test that is in a file and was not run is a regression too.
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
                (Err(failure), Some(expected)) if failure.class == expected.class => {
                    report.expected += 1;
                }
                (Err(Failure { class, detail, .. }), expected) => {
                    let before = match expected {
                        Some(Expected { class, .. }) => format!("failed with {class} before, now "),
                        None if self.passes.contains(name) => String::new(),
                        None => "not recorded yet: ".to_string(),
                    };
                    report.regressions.push((name.clone(), format!("{before}{class}: {detail}")));
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

/// Parses a line of the file of expected failures. Test names contain no colon.
fn parse(line: &str) -> Option<(String, Expected)> {
    let (name, rest) = line.split_once(": ")?;
    let (class, reason) = rest.split_once(" | ")?;
    Some((name.to_string(), Expected { class: class.to_string(), reason: reason.to_string() }))
}

/// Shortens an error text for a snapshot: one line, not too long, without what changes from run to run (temporary folders, process
/// ids, addresses).
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
    use super::{super::Stage, *};

    fn failure(stage: Stage, kind: &str, reason: &str) -> Result<(), Failure> {
        Err(Failure::new(stage, kind, reason))
    }

    fn outcomes(list: &[(&str, Result<(), Failure>)]) -> Outcomes {
        list.iter().map(|(name, outcome)| (name.to_string(), outcome.clone())).collect()
    }

    #[test]
    fn survives_the_files() {
        let dir = tempfile::tempdir().unwrap();
        let before = Snapshot::of(&outcomes(&[
            ("a", Ok(())),
            ("b", failure(Stage::Build, "unimplemented", "no: such | operator")),
            ("c", failure(Stage::Outputs, "wrong-values", "wrong values")),
        ]));
        before.write(dir.path(), "p").unwrap();
        let file = dir.path().join("p.expected-failures.txt");
        let lines = fs::read_to_string(&file).unwrap();
        assert_eq!(
            lines.strip_prefix(HEADER).unwrap(),
            "b: build/unimplemented | no: such | operator\nc: outputs/wrong-values | wrong values\n"
        );
        assert_eq!(Snapshot::read(dir.path(), "p").unwrap(), before);
        assert_eq!(Snapshot::read(dir.path(), "other").unwrap(), Snapshot::default());
        fs::write(&file, "b\tno class\n").unwrap();
        assert!(Snapshot::read(dir.path(), "p").unwrap_err().to_string().contains("no class"));
    }

    #[test]
    fn distinguishes_regressions_from_improvements() {
        let unsupported = || failure(Stage::Build, "unimplemented", "why");
        let old = [("a", Ok(())), ("b", Ok(())), ("c", unsupported()), ("d", unsupported()), ("e", Ok(()))];
        let snapshot = Snapshot::of(&outcomes(&old));
        let now = [
            ("a", Ok(())),
            ("b", unsupported()),
            ("c", failure(Stage::Build, "unimplemented", "in other words")),
            ("d", Ok(())),
            ("new", unsupported()),
        ];
        let report = snapshot.judge(&outcomes(&now), true);
        assert_eq!((report.passed, report.expected), (2, 1));
        assert_eq!(report.improvements, ["d"]);
        let names: Vec<&str> = report.regressions.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["b", "new", "e"]);
        assert_eq!(snapshot.judge(&outcomes(&now[..1]), false).regressions.len(), 0);
    }

    #[test]
    fn an_expected_failure_that_fails_in_another_way_is_a_regression() {
        let old = failure(Stage::Build, "unimplemented", "why");
        let snapshot = Snapshot::of(&outcomes(&[("a", old)]));
        for (stage, kind) in [
            (Stage::Build, "crash"),
            (Stage::Build, "internal"),
            (Stage::Run, "unimplemented"),
            (Stage::Outputs, "wrong-values"),
        ] {
            let report = snapshot.judge(&outcomes(&[("a", failure(stage, kind, "what"))]), true);
            assert_eq!((report.expected, report.regressions.len()), (0, 1));
            let why = &report.regressions[0].1;
            assert!(why.starts_with("failed with build/unimplemented before, now "), "{why}");
        }
    }

    /// A node that a provider would compute wrongly is refused, as in docs/provider-spec.md.
    #[test]
    fn no_snapshot_has_wrong_numbers() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("conformance");
        let names =
            fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let providers: Vec<String> =
            names.filter_map(|name| Some(name.strip_suffix(".passes.txt")?.to_string())).collect();
        assert!(providers.len() > 4);
        // This one runs only on Intel's processors. It was recorded before these faults were fixed.
        for provider in providers.iter().filter(|provider| *provider != "onnxruntime-openvino") {
            let snapshot = Snapshot::read(&folder, provider).unwrap();
            assert!(snapshot.passes.len() > 900);
            for (test, Expected { class, .. }) in snapshot.failures {
                let harmless = ["outputs/random", "outputs/rounding", "outputs/saturated"].contains(&&*class);
                assert!(harmless || !class.starts_with("outputs/"), "{provider}: {test}: {class}");
            }
        }
    }

    #[test]
    fn reasons_are_short_and_stable() {
        assert_eq!(shorten("a\n  b at 0x7ffe, /tmp/x/y: bad"), "a b at … bad");
        let long = shorten(&format!("begin {} end", "ü".repeat(500)));
        assert_eq!(long.chars().count(), HEAD + 1 + TAIL);
        assert!(long.starts_with("begin ") && long.ends_with(" end"));
    }
}

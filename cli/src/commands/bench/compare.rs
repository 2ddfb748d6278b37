//! `sdrun bench compare`

use super::table;
use crate::{context::Context, exit, format};
use sdrun::{
    abi::Error,
    bench::{CaseReport, Report, Row, SCHEMA_VERSION, Status},
    files::{Links, read_small},
};
use serde::Serialize;
use serde_json::Value;
use std::{
    collections::BTreeMap,
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

/// More than any report takes.
const MOST_BYTES: u64 = 256 << 20;

/// Compare reports of different machines, versions or settings
///
/// Each report is compared with the first one: for each model, precision and system, the ratio of the median times and a verdict. A
/// difference counts only if it exceeds the spread of the runs. The exit code is 1 if --fail-if-slower is given and something is
/// slower by more than that, wrong, or no longer runs.
///
/// Example: sdrun bench compare main.json change.json --fail-if-slower 5%
#[derive(clap::Args)]
pub(super) struct Args {
    /// JSON reports of `sdrun bench --export json`, the one to compare with first
    #[arg(value_name = "REPORT", num_args = 2.., required = true)]
    reports: Vec<PathBuf>,

    /// Exit with 1 if something is slower by more than this share, such as 5%, or no longer gives correct results
    #[arg(long, value_name = "SHARE", value_parser = share)]
    fail_if_slower: Option<f64>,
}

fn share(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').unwrap_or(text).trim();
    match number.parse::<f64>() {
        Ok(value) if value >= 0.0 && value.is_finite() => Ok(value / 100.0),
        _ => Err(format!("{text:?} is not a share such as 5%")),
    }
}

/// How a system did in two reports.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Verdict {
    Faster,
    Same,
    Slower,
    /// It ran with correct results before.
    Broken,
    /// It runs with correct results now.
    Repaired,
    /// Only one of the reports has it, or it ran in neither.
    Incomparable,
}

#[derive(Serialize)]
struct Line {
    report: String,
    model: String,
    precision: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    threads: Option<usize>,
    /// As in the table: other software in parentheses.
    system: String,
    before_ms: Option<f64>,
    after_ms: Option<f64>,
    ratio: Option<f64>,
    /// What runs of one report differ by, as a share; a smaller difference says nothing.
    spread: Option<f64>,
    verdict: Verdict,
}

#[derive(Serialize)]
struct Compared {
    base: String,
    /// What differs between the machines and the versions.
    remarks: Vec<String>,
    lines: Vec<Line>,
}

pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    let reports: Vec<(String, Report)> =
        args.reports.iter().map(|path| Ok((name(path), read(path)?))).collect::<anyhow::Result<_>>()?;
    let Some(((base_name, base), others)) = reports.split_first() else {
        return Err(Error::invalid("there is no report").into());
    };
    let mut compared = Compared { base: base_name.clone(), remarks: Vec::new(), lines: Vec::new() };
    for (name, report) in others {
        compared.remarks.extend(differences(base, report).into_iter().map(|what| format!("{name}: {what}")));
        for case in &base.cases {
            let other = report.cases.iter().find(|other| same(case, other));
            for row in &case.rows {
                let after = other
                    .and_then(|other| other.rows.iter().find(|other| table::key(other) == table::key(row)));
                compared.lines.push(line(name, case, row, after));
            }
        }
    }
    context.present(&compared, |out| show(out, &compared))?;
    let failed = args.fail_if_slower.is_some_and(|most| compared.lines.iter().any(|line| fails(line, most)));
    Ok(ExitCode::from(if failed { exit::NO } else { 0 }))
}

/// Whether two cases measured the same.
fn same(a: &CaseReport, b: &CaseReport) -> bool {
    table::is_same_work(a, b) && a.threads == b.threads
}

fn fails(line: &Line, most: f64) -> bool {
    match line.verdict {
        Verdict::Slower => line.ratio.is_some_and(|ratio| ratio > 1.0 + most),
        Verdict::Broken => true,
        _ => false,
    }
}

fn line(report: &str, case: &CaseReport, before: &Row, after: Option<&Row>) -> Line {
    let ok = |row: &Row| row.status == Status::Ok;
    let median =
        |row: Option<&Row>| row.filter(|row| ok(row)).and_then(|row| Some(row.stats.as_ref()?.median_ms));
    let (before_ms, after_ms) = (median(Some(before)), median(after));
    let ratio = before_ms.zip(after_ms).map(|(before, after)| after / before);
    let spread = after.and_then(|after| Some(spread(before)?.max(spread(after)?)));
    let verdict = match (ratio, spread, after) {
        (Some(ratio), Some(spread), _) if ratio > 1.0 + spread => Verdict::Slower,
        (Some(ratio), Some(spread), _) if ratio < 1.0 / (1.0 + spread) => Verdict::Faster,
        (Some(_), ..) => Verdict::Same,
        (None, _, Some(after)) if ok(before) && !ok(after) => Verdict::Broken,
        (None, _, Some(after)) if !ok(before) && ok(after) => Verdict::Repaired,
        _ => Verdict::Incomparable,
    };
    Line {
        report: report.into(),
        model: case.model.clone(),
        precision: case.precision.clone(),
        threads: case.threads,
        system: table::name(before),
        before_ms,
        after_ms,
        ratio,
        spread,
        verdict,
    }
}

/// The 95 % interval of a median, as a share of it: medians of turns differ by this much within one report.
fn spread(row: &Row) -> Option<f64> {
    let stats = row.stats.as_ref()?;
    let turns = row.counted().len().max(1) as f64;
    // 1.253 is the deviation of a median relative to that of a mean.
    Some(1.96 * 1.253 * stats.stddev_ms / stats.median_ms / turns.sqrt())
}

/// What else differs between two reports.
pub(super) fn differences(a: &Report, b: &Report) -> Vec<String> {
    let mut found = Vec::new();
    let mut differ = |what: &str, a: &str, b: &str| {
        if a != b {
            found.push(format!("{what} {b} instead of {a}"));
        }
    };
    differ("sdrun", &a.sdrun_version, &b.sdrun_version);
    let cpu = |report: &Report| report.environment.cpu.clone().unwrap_or_else(|| "unknown".into());
    differ("processor", &cpu(a), &cpu(b));
    differ("cores", &a.environment.cores.to_string(), &b.environment.cores.to_string());
    let runtimes = |report: &Report| -> BTreeMap<String, String> {
        let rows = report.cases.iter().flat_map(|case| &case.rows);
        rows.filter_map(|row| Some((table::name(row), row.runtime.as_ref()?.version.clone()))).collect()
    };
    let after = runtimes(b);
    for (system, before) in runtimes(a) {
        if let Some(after) = after.get(&system) {
            differ(&format!("runtime of {system}"), &before, after);
        }
    }
    found
}

fn name(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

pub(super) fn read(path: &Path) -> Result<Report, Error> {
    let file = path.display();
    let text = read_small(path, Links::Follow, MOST_BYTES)?;
    let document: Value =
        serde_json::from_slice(&text).map_err(|e| Error::invalid(format!("{file} is not JSON: {e}")))?;
    match document.get("schema_version").and_then(Value::as_u64) {
        Some(version) if version == u64::from(SCHEMA_VERSION) => serde_json::from_value(document)
            .map_err(|e| Error::invalid(format!("{file} is not a report of `sdrun bench`: {e}"))),
        Some(version) => {
            let message =
                format!("{file} has schema version {version}, and this sdrun reads {SCHEMA_VERSION}");
            Err(Error::invalid(message).with_hint("measure again with one version of sdrun"))
        }
        None => Err(Error::invalid(format!("{file} is not a report of `sdrun bench --export json`"))),
    }
}

fn show(out: &mut dyn Write, compared: &Compared) -> io::Result<()> {
    for remark in &compared.remarks {
        writeln!(out, "{remark}")?;
    }
    let mut table = format::table([
        "report",
        "model",
        "precision",
        "system",
        "before ms",
        "after ms",
        "ratio",
        "verdict",
    ]);
    for line in &compared.lines {
        let ms = |value: Option<f64>| value.map_or("-".into(), format::three_digits);
        table.add_row([
            format::line(&line.report).into_owned(),
            format::line(&line.model).into_owned(),
            format::line(&table::setting(&line.precision, line.threads)).into_owned(),
            format::line(&line.system).into_owned(),
            ms(line.before_ms),
            ms(line.after_ms),
            line.ratio
                .zip(line.spread)
                .map_or("-".into(), |(ratio, spread)| format!("{ratio:.2} ± {spread:.2}")),
            format::word(&line.verdict),
        ]);
    }
    format::right(&mut table, 4..7);
    writeln!(out, "{table}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::bench::table::tests::report;

    #[test]
    fn verdicts() {
        let report = report();
        let case = &report.cases[0];
        let row = |name: &str| case.rows.iter().find(|row| row.system == name).unwrap().clone();
        let scaled = |mut row: Row, factor: f64| {
            row.stats.as_mut().unwrap().median_ms *= factor;
            row
        };
        let judge = |before: &Row, after: &Row| line("b", case, before, Some(after)).verdict;
        // The deviation is 1 ms: an interval of 25 % for one turn of 10 ms.
        let fast = row("fast");
        assert_eq!(judge(&fast, &fast), Verdict::Same);
        assert_eq!(judge(&fast, &scaled(fast.clone(), 1.2)), Verdict::Same);
        assert_eq!(judge(&fast, &scaled(fast.clone(), 1.4)), Verdict::Slower);
        assert_eq!(judge(&fast, &scaled(fast.clone(), 0.6)), Verdict::Faster);
        assert_eq!(judge(&fast, &row("wrong")), Verdict::Broken);
        assert_eq!(judge(&row("wrong"), &fast), Verdict::Repaired);
        assert_eq!(judge(&row("wrong"), &row("away")), Verdict::Incomparable);
        assert_eq!(line("b", case, &fast, None).verdict, Verdict::Incomparable);
        let slower = line("b", case, &fast, Some(&scaled(fast.clone(), 1.4)));
        assert!(fails(&slower, 0.05) && !fails(&slower, 0.5));
        assert!(fails(&line("b", case, &fast, Some(&row("wrong"))), 1.0));
    }

    #[test]
    fn shares() {
        assert_eq!((share("5%"), share("2.5 %"), share("5")), (Ok(0.05), Ok(0.025), Ok(0.05)));
        assert!(share("-1%").is_err() && share("x").is_err() && share("inf").is_err());
    }
}

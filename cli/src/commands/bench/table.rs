//! Bench reports as tables.

use crate::format;
use comfy_table::{ContentArrangement, Table, presets};
use sdrun::bench::{CaseReport, Environment, Kind, Ratio, Report, Row, Status, threads};
use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, IsTerminal, Write},
};

/// A column: its header, how early it leaves a narrow table (the largest number first), and its cells.
struct Column {
    header: &'static str,
    dispensable: u8,
    is_number: bool,
    cell: fn(&CaseReport, &Row) -> String,
}

/// Header of the speed of whole pictures.
const STEPS: &str = "steps/s";

/// From left to right.
const COLUMNS: &[Column] = &[
    Column { header: "system", dispensable: 0, is_number: false, cell: |_, row| name(row) },
    Column { header: "", dispensable: 0, is_number: false, cell: |_, row| verdict(row) },
    Column { header: "precision", dispensable: 1, is_number: false, cell: precision },
    Column {
        header: "median ms",
        dispensable: 0,
        is_number: true,
        cell: |_, row| some(row.stats.as_ref().map(|s| s.median_ms)),
    },
    Column {
        header: "p95 ms",
        dispensable: 6,
        is_number: true,
        cell: |_, row| some(row.stats.as_ref().and_then(|s| s.p95_ms)),
    },
    Column {
        header: "of the best",
        dispensable: 0,
        is_number: true,
        cell: |_, row| row.versus_best.map_or("-".into(), ratio),
    },
    Column {
        header: STEPS,
        dispensable: 0,
        is_number: true,
        cell: |case, row| {
            let ms = row.stats.as_ref().map(|stats| stats.median_ms);
            some(case.steps.zip(ms).map(|(steps, ms)| steps as f64 * 1e3 / ms))
        },
    },
    Column { header: "build s", dispensable: 2, is_number: true, cell: |_, row| some(row.build_seconds) },
    Column { header: "load s", dispensable: 2, is_number: true, cell: |_, row| some(row.load_seconds) },
    Column { header: "first ms", dispensable: 5, is_number: true, cell: |_, row| some(row.first_run_ms) },
    Column {
        header: "peak MB",
        dispensable: 1,
        is_number: true,
        cell: |_, row| row.memory.peak_bytes().map_or("-".into(), format::megabytes),
    },
    Column {
        header: "engine MB",
        dispensable: 7,
        is_number: true,
        cell: |_, row| row.engine_bytes.map_or("-".into(), format::megabytes),
    },
    Column {
        header: "cosine",
        dispensable: 3,
        is_number: true,
        cell: |_, row| row.accuracy.as_ref().map_or("-".into(), |a| format!("{:.6}", a.worst.cosine)),
    },
    Column {
        header: "relative",
        dispensable: 6,
        is_number: true,
        cell: |_, row| {
            row.accuracy.as_ref().map_or("-".into(), |a| format!("{:.1e}", a.worst.relative_error))
        },
    },
    Column {
        header: "PSNR dB",
        dispensable: 8,
        is_number: true,
        cell: |_, row| some(row.accuracy.as_ref().and_then(|a| a.worst.psnr_db)),
    },
    Column { header: "settings", dispensable: 9, is_number: false, cell: |_, row| row.settings.join(", ") },
    Column {
        header: "runtime",
        dispensable: 10,
        is_number: false,
        cell: |_, row| row.runtime.as_ref().map_or("-".into(), |r| format!("{} {}", r.name, r.version)),
    },
];

/// Width of the terminal; unlimited in a pipe.
pub(super) fn width() -> usize {
    let unlimited = usize::MAX;
    if !io::stdout().is_terminal() {
        return unlimited;
    }
    Table::new().width().map_or(unlimited, usize::from)
}

pub(super) fn show(out: &mut dyn Write, report: &Report, width: usize) -> io::Result<()> {
    writeln!(out, "sdrun {} on {}", report.sdrun_version, machine(&report.environment))?;
    let mut said = BTreeSet::new();
    for case in &report.cases {
        writeln!(out, "\n{}", title(case))?;
        writeln!(out, "{}", table(case, width, |text| text))?;
        for line in remarks(case, &mut said) {
            writeln!(out, "  {line}")?;
        }
    }
    for Scaling { title, table } in scaling(report) {
        writeln!(out, "\n{title}\n{table}")?;
    }
    if report.cases.iter().flat_map(|case| &case.rows).any(|row| row.kind == Kind::Baseline) {
        writeln!(out, "\nIn parentheses: other software, measured beside the providers.")?;
    }
    Ok(())
}

/// How much faster the systems of a case become with more threads.
pub(super) struct Scaling {
    pub(super) title: String,
    pub(super) table: Table,
}

/// The cases that were measured with several numbers of threads.
pub(super) fn scaling(report: &Report) -> Vec<Scaling> {
    let mut groups: Vec<BTreeMap<usize, &CaseReport>> = Vec::new();
    for (case, count) in report.cases.iter().filter_map(|case| Some((case, case.threads?))) {
        match groups.iter_mut().find(|cases| cases.values().any(|other| is_same_work(other, case))) {
            Some(cases) => drop(cases.insert(count, case)),
            None => groups.push(BTreeMap::from([(count, case)])),
        }
    }
    groups.iter().filter(|cases| cases.len() > 1).filter_map(scaling_of).collect()
}

/// Whether two cases differ in nothing but the threads and the systems. Topologies of versions may differ.
pub(super) fn is_same_work(a: &CaseReport, b: &CaseReport) -> bool {
    (&a.model, &a.precision, &a.shapes) == (&b.model, &b.precision, &b.shapes)
}

fn scaling_of(cases: &BTreeMap<usize, &CaseReport>) -> Option<Scaling> {
    let (least, first) = cases.first_key_value()?;
    let header = ["system".to_string()].into_iter().chain(cases.keys().map(|count| threads(*count)));
    let mut table = format::table(header);
    table.set_content_arrangement(ContentArrangement::Disabled);
    for row in &first.rows {
        // Wrong results count for nothing.
        let median = |case: &CaseReport| {
            let row = case.rows.iter().find(|other| key(other) == key(row))?;
            let counts = matches!(row.status, Status::Ok | Status::Unverified);
            row.stats.as_ref().filter(|_| counts).map(|stats| stats.median_ms)
        };
        let alone = median(first);
        let cell = |case: &CaseReport| match (alone, median(case)) {
            (_, None) => "-".into(),
            (None, Some(ms)) => format::three_digits(ms),
            (Some(alone), Some(ms)) => format!("{} ({:.2}x)", format::three_digits(ms), alone / ms),
        };
        table.add_row([name(row)].into_iter().chain(cases.values().map(|case| cell(case))));
    }
    format::right(&mut table, 1..cases.len() + 1);
    let title = format!(
        "{}, {}: median ms, and how many times as fast as with {}",
        first.model,
        first.precision,
        threads(*least)
    );
    Some(Scaling { title: format::line(&title).into_owned(), table })
}

/// The machine in words.
pub(super) fn machine(e: &Environment) -> String {
    let memory = e.memory_bytes.map_or("unknown memory".into(), format::bytes);
    let cpu = e.cpu.as_deref().unwrap_or("unknown processor");
    let physical = e.physical_cores.map_or(String::new(), |n| format!(" of {n} cores"));
    let sets = if e.instruction_sets.is_empty() {
        String::new()
    } else {
        format!(", {}", e.instruction_sets.join(" "))
    };
    let virtual_machine = if e.virtual_machine == Some(true) { ", virtual machine" } else { "" };
    let version = e.os_version.as_deref().unwrap_or_default();
    format!(
        "{cpu}, {} threads{physical}, {memory}{virtual_machine}, {} {version} {}{sets}",
        e.cores, e.os, e.arch
    )
}

/// A case's precision, and its threads if they were chosen.
pub(super) fn setting(precision: &str, count: Option<usize>) -> String {
    count.map_or(precision.into(), |count| format!("{precision}, {}", threads(count)))
}

/// Model, shapes and reference.
pub(super) fn title(case: &CaseReport) -> String {
    let shapes = case.shapes.iter().map(|(name, shape)| format!("{name} {shape:?}"));
    let reference =
        case.reference.as_deref().map_or("nothing to compare with".into(), |r| format!("compared with {r}"));
    let setting = setting(&case.precision, case.threads);
    let about = [case.model.clone(), setting].into_iter().chain(shapes).chain([reference]);
    format::line(&about.collect::<Vec<_>>().join(", ")).into_owned()
}

/// One row for each system: the ranked ones first, then the others in their original order. Columns that do not fit are left out. `written`
/// is how the text of a cell is written.
fn table(case: &CaseReport, width: usize, written: impl Fn(String) -> String) -> Table {
    let rows = ordered(case);
    // Only whole pictures have steps.
    let all: Vec<&Column> =
        COLUMNS.iter().filter(|column| case.steps.is_some() || column.header != STEPS).collect();
    let longest = |column: &Column| {
        let cells = rows.iter().map(|row| (column.cell)(case, row).chars().count());
        cells.chain([column.header.chars().count()]).max().unwrap_or_default()
    };
    let widths: Vec<usize> = all.iter().map(|column| longest(column)).collect();
    // A space on each side of a cell, and one between two.
    let total = |most: u8| -> usize {
        all.iter()
            .zip(&widths)
            .filter(|(c, _)| c.dispensable <= most)
            .map(|(_, width)| width + 3)
            .sum::<usize>()
            - 1
    };
    let most = (0..=10).rev().find(|most| total(*most) <= width).unwrap_or(0);
    let columns: Vec<&Column> = all.into_iter().filter(|column| column.dispensable <= most).collect();
    let mut table = format::table(columns.iter().map(|column| column.header));
    table.set_content_arrangement(ContentArrangement::Disabled);
    for row in rows {
        table.add_row(
            columns.iter().map(|column| written(format::line(&(column.cell)(case, row)).into_owned())),
        );
    }
    for (at, _) in columns.iter().enumerate().filter(|(_, column)| column.is_number) {
        format::right(&mut table, at..at + 1);
    }
    table
}

pub(super) fn markdown_table(case: &CaseReport) -> String {
    let mut table = table(case, usize::MAX, |text| text.replace('|', "\\|"));
    table.load_style(presets::ASCII_MARKDOWN);
    table.to_string()
}

fn ordered(case: &CaseReport) -> Vec<&Row> {
    let mut rows: Vec<&Row> = case.rows.iter().collect();
    rows.sort_by_key(|row| row.rank.unwrap_or(usize::MAX));
    rows
}

/// Tells the rows of a case apart: other software may have the name of a provider.
pub(super) fn key(row: &Row) -> (Kind, &str) {
    (row.kind, &row.system)
}

/// The system's name; that of other software in parentheses.
pub(super) fn name(row: &Row) -> String {
    match row.kind {
        Kind::Provider => row.system.clone(),
        Kind::Baseline => format!("({})", row.system),
    }
}

fn some(value: Option<f64>) -> String {
    value.map_or("-".into(), format::three_digits)
}

fn precision(case: &CaseReport, row: &Row) -> String {
    row.precision.clone().unwrap_or_else(|| case.precision.clone())
}

/// `1.02 ± 0.05`: the larger half of the interval.
fn ratio(ratio: Ratio) -> String {
    let half = (ratio.high - ratio.ratio).max(ratio.ratio - ratio.low);
    format!("{:.2} ± {half:.2}", ratio.ratio)
}

/// The rank of a row, or a word if it has none. Who is known to be no slower than the best shares its place.
fn verdict(row: &Row) -> String {
    match (row.rank, row.status) {
        (Some(rank), _) if rank > 1 && row.versus_best.is_some_and(|versus| versus.is_draw()) => {
            "draw".into()
        }
        (Some(rank), _) => format!("#{rank}"),
        (None, Status::Ok) => "not timed".into(),
        (None, Status::Inaccurate) => "WRONG".into(),
        (None, Status::Unverified) => "unverified".into(),
        (None, Status::Unsupported) => "unsupported".into(),
        (None, Status::Absent) => "absent".into(),
        (None, Status::Failed) => "failed".into(),
        (None, Status::TimedOut) => "timed out".into(),
    }
}

/// Reasons and warnings, which are too long for a cell. `said` has the reasons below earlier tables, which are not repeated: a provider
/// without its runtime is absent from each.
pub(super) fn remarks(case: &CaseReport, said: &mut BTreeSet<String>) -> Vec<String> {
    let mut remarks = Vec::new();
    for row in ordered(case) {
        let own = format!("{}: ", name(row));
        // Errors already begin with the system's name.
        let begin = format!("{}: ", row.system);
        let reason = row.reason.as_ref().map(|why| why.strip_prefix(&begin).unwrap_or(why));
        remarks.extend(reason.map(|why| format!("{own}{why}")).filter(|line| said.insert(line.clone())));
        remarks.extend(row.refit.iter().map(|refit| format!("{own}{}", format::refit(refit))));
        remarks.extend(row.warnings.iter().map(|what| format!("{own}warning: {what}")));
    }
    remarks
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// A row, with the fields that differ from an empty one.
    fn row(system: &str, status: &str, more: Value) -> Value {
        let mut row = json!({
            "system": system, "kind": "provider", "status": status, "precision": "fp32", "settings": [], "turns": [],
            "memory": {}, "warnings": []
        });
        let fields = row.as_object_mut().unwrap();
        fields.extend(more.as_object().unwrap().clone());
        row
    }

    /// A report with a row of every kind, read back from JSON.
    pub(crate) fn report() -> Report {
        let stats = |median: f64| {
            json!({
                "runs": 10, "median_ms": median, "mean_ms": 1, "stddev_ms": 1, "min_ms": 1, "max_ms": 1,
                "p90_ms": 1, "p95_ms": 12.5, "p99_ms": null
            })
        };
        let accuracy = |accepted: bool| {
            let worst = json!({
                "output": "y", "max_abs_error": 0.1, "mean_abs_error": 0.1, "max_abs_reference": 1,
                "relative_error": 0.00012, "cosine": 0.999998, "snr_db": 40, "psnr_db": 46.5, "not_finite": 0
            });
            json!({ "accepted": accepted, "tolerance": { "relative_error": 0.001, "cosine": 0.99999 }, "worst": worst })
        };
        let rows = [
            row(
                "slow",
                "ok",
                json!({
                    "rank": 2, "versus_best": { "ratio": 2, "low": 1.9, "high": 2.1 }, "settings": ["2 threads", "a=b"],
                    "build_seconds": 1.234, "engine_bytes": 2_500_000, "load_seconds": 0.5, "first_run_ms": 30,
                    "stats": stats(20.0), "accuracy": accuracy(true)
                }),
            ),
            row("fast", "ok", json!({ "rank": 1, "stats": stats(10.0), "accuracy": accuracy(true) })),
            row(
                "wrong",
                "inaccurate",
                json!({ "reason": "output \"y\" is too far", "stats": stats(1.0), "accuracy": accuracy(false) }),
            ),
            row(
                "away",
                "absent",
                json!({ "precision": null, "reason": "away: the runtime, \"x\", is not installed" }),
            ),
        ];
        let report = json!({
            "schema_version": 2, "sdrun_version": "0.1.0", "unix_time": 1,
            "environment": {
                "os": "linux", "arch": "x86_64", "cpu": "CPU", "cores": 4, "memory_bytes": 8_000_000_000u64,
                "instruction_sets": ["avx2"]
            },
            "cases": [{
                "model": "m|1", "topology": "t", "precision": "fp32", "shapes": { "x": [1, 2] }, "inputs_sha256": "h",
                "reference": "ref", "heats": 1, "rows": rows
            }]
        });
        serde_json::from_value(report).unwrap()
    }

    #[test]
    fn ranked_rows_come_first_and_reasons_follow() {
        let mut report = report();
        report.cases.push(report.cases[0].clone());
        let mut out = Vec::new();
        show(&mut out, &report, usize::MAX).unwrap();
        let text = String::from_utf8(out).unwrap();
        let place = |what: &str| text.find(what).unwrap_or_else(|| panic!("{what:?} is not in\n{text}"));
        let order = ["m|1, fp32, x [1, 2], compared with ref", "fast", "slow", "wrong", "away"].map(place);
        assert!(order.is_sorted(), "{text}");
        for cell in [
            "#1",
            "#2",
            "10.0",
            "20.0",
            "12.5",
            "1.23",
            "2.50",
            "2.00 ± 0.10",
            "0.999998",
            "1.2e-4",
            "WRONG",
            "absent",
        ] {
            place(cell);
        }
        place("  wrong: output \"y\" is too far");
        place("  away: the runtime, \"x\", is not installed");
        let times = |what: &str| text.matches(what).count();
        assert_eq!((times("compared with ref"), times("is not installed")), (2, 1), "{text}");
    }

    #[test]
    fn threads_are_compared() {
        let with = |threads: usize, median: f64| {
            let mut case = report().cases.remove(0);
            case.threads = Some(threads);
            case.rows[1].stats.as_mut().unwrap().median_ms = median;
            case
        };
        let mut report = report();
        assert!(scaling(&report).is_empty());
        // The others are of another shape, and of a number of threads that nobody chose.
        let mut other = with(2, 1.0);
        other.shapes.clear();
        report.cases.extend([with(4, 3.0), other, with(1, 10.0)]);
        let [Scaling { title, table }] = &scaling(&report)[..] else { panic!("one table") };
        assert_eq!(title, "m|1, fp32: median ms, and how many times as fast as with 1 thread");
        let text = table.to_string();
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["system", "1", "thread", "4", "threads"], "{text}");
        for line in [
            ["slow", "20.0", "(1.00x)", "20.0", "(1.00x)"].as_slice(),
            &["fast", "10.0", "(1.00x)", "3.00", "(3.33x)"],
            &["wrong", "-", "-"],
            &["away", "-", "-"],
        ] {
            assert!(lines.iter().any(|found| found == line), "{line:?}\n{text}");
        }
        let mut out = Vec::new();
        show(&mut out, &report, usize::MAX).unwrap();
        let shown = String::from_utf8(out).unwrap();
        assert!(shown.contains(title) && shown.contains("m|1, fp32, 4 threads, x [1, 2]"), "{shown}");
    }

    /// A narrow table has fewer columns, and no line is longer than the terminal.
    #[test]
    fn tables_fit() {
        let report = report();
        let of = |width: usize| table(&report.cases[0], width, |text| text).to_string();
        let columns =
            |text: &str| text.lines().next().unwrap().split("  ").filter(|c| !c.trim().is_empty()).count();
        for width in [60, 80, 120, 200] {
            let text = of(width);
            assert!(text.lines().all(|line| line.chars().count() <= width), "{width}\n{text}");
            assert!(text.contains("2.00 ± 0.10") && text.contains("median ms"), "{text}");
        }
        assert!(columns(&of(80)) < columns(&of(120)) && columns(&of(120)) < columns(&of(200)));
    }
}

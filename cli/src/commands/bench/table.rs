//! Bench reports as tables.

use crate::format;
use comfy_table::{Table, presets};
use sdrun::bench::{CaseReport, Report, Row, Status};
use std::io::{self, Write};

const HEADER: [&str; 11] = [
    "provider",
    "precision",
    "build s",
    "engine MB",
    "load s",
    "first ms",
    "median ms",
    "p95 ms",
    "peak MB",
    "cosine / relative",
    "verdict",
];

pub(super) fn show(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    let e = &report.environment;
    let memory = e.memory_bytes.map_or("unknown memory".into(), format::bytes);
    let cpu = e.cpu.as_deref().unwrap_or("unknown processor");
    writeln!(
        out,
        "sdrun {} on {cpu}, {} threads, {memory}, {} {}",
        report.sdrun_version, e.cores, e.os, e.arch
    )?;
    for case in &report.cases {
        writeln!(out, "\n{}", title(case))?;
        writeln!(out, "{}", table(case))?;
        for line in remarks(case) {
            writeln!(out, "  {line}")?;
        }
    }
    Ok(())
}

/// Model, shapes, precision and reference.
pub(super) fn title(case: &CaseReport) -> String {
    let shapes = case.shapes.iter().map(|(name, shape)| format!("{name} {shape:?}"));
    let reference =
        case.reference.as_deref().map_or("nothing to compare with".into(), |r| format!("compared with {r}"));
    format!("{}, {}, {}, {reference}", case.model, case.precision, format::list(shapes))
}

/// One row per provider: the ranked ones first, then the others in their original order.
pub(super) fn table(case: &CaseReport) -> Table {
    let mut table = format::table(HEADER);
    for row in ordered(case) {
        table.add_row(cells(case, row));
    }
    format::right(&mut table, 2..9);
    table
}

pub(super) fn markdown_table(case: &CaseReport) -> String {
    let mut table = table(case);
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_content_arrangement(comfy_table::ContentArrangement::Disabled);
    table.to_string()
}

fn ordered(case: &CaseReport) -> Vec<&Row> {
    let mut rows: Vec<&Row> = case.rows.iter().collect();
    rows.sort_by_key(|row| row.rank.unwrap_or(usize::MAX));
    rows
}

fn cells(case: &CaseReport, row: &Row) -> [String; 11] {
    let some = |v: Option<f64>| v.map_or("-".into(), format::three_digits);
    let accuracy = row
        .accuracy
        .as_ref()
        .map_or("-".into(), |a| format!("{:.6} / {:.1e}", a.worst.cosine, a.worst.relative_error));
    [
        row.provider.clone(),
        row.precision.clone().unwrap_or_else(|| case.precision.clone()),
        some(row.build_seconds),
        row.engine_bytes.map_or("-".into(), format::megabytes),
        some(row.load_seconds),
        some(row.first_run_ms),
        some(row.stats.as_ref().map(|s| s.median_ms)),
        some(row.stats.as_ref().map(|s| s.p95_ms)),
        row.memory.peak_bytes().map_or("-".into(), format::megabytes),
        accuracy,
        verdict(row),
    ]
}

/// The rank of a row, or a word if it has none.
pub(super) fn verdict(row: &Row) -> String {
    match (row.rank, row.status) {
        (Some(rank), _) => format!("#{rank}"),
        (None, Status::Ok) => "ok".into(),
        (None, Status::Inaccurate) => "INACCURATE, not ranked".into(),
        (None, Status::Unverified) => "unverified, not ranked".into(),
        (None, Status::Unsupported) => "unsupported".into(),
        (None, Status::Absent) => "absent".into(),
        (None, Status::Failed) => "failed".into(),
        (None, Status::TimedOut) => "timed out".into(),
    }
}

/// Reasons and warnings, which are too long for a cell.
pub(super) fn remarks(case: &CaseReport) -> Vec<String> {
    let mut remarks = Vec::new();
    for row in ordered(case) {
        let own = format!("{}: ", row.provider);
        // A provider's errors already begin with its name.
        remarks
            .extend(row.reason.iter().map(|why| format!("{own}{}", why.strip_prefix(&own).unwrap_or(why))));
        remarks.extend(row.refit.iter().map(|refit| format!("{own}{}", format::refit(refit))));
        remarks.extend(row.warnings.iter().map(|what| format!("{own}warning: {what}")));
    }
    remarks
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A report with a row of every kind, read back from JSON.
    pub(crate) fn report() -> Report {
        let row = |provider: &str, status: &str, more: &str| {
            format!(
                r#"{{"provider":"{provider}","status":"{status}","times_ms":[],"memory":{{}},"warnings":[]{more}}}"#
            )
        };
        let stats = |median: f64| {
            format!(
                r#""stats":{{"runs":10,"median_ms":{median},"mean_ms":1,"stddev_ms":1,"min_ms":1,"max_ms":1,
                "p90_ms":1,"p95_ms":12.5,"p99_ms":null}}"#
            )
        };
        let accuracy = |accepted: bool| {
            format!(
                r#""accuracy":{{"accepted":{accepted},"tolerance":{{"relative_error":0.001,"cosine":0.99999}},"worst":{{
                "output":"y","max_abs_error":0.1,"mean_abs_error":0.1,"max_abs_reference":1,"relative_error":0.00012,
                "cosine":0.999998,"snr_db":40,"not_finite":0}}}}"#
            )
        };
        let slow = format!(
            r#","rank":2,"precision":"fp32","build_seconds":1.234,"engine_bytes":2500000,"load_seconds":0.5,
            "first_run_ms":30,"memory":{{"run_bytes":100000000}},"warnings":["1 of 10 runs are statistical outliers"],
            {},{}"#,
            stats(20.0),
            accuracy(true)
        )
        // The later key would be a duplicate.
        .replace(r#""memory":{"run_bytes":100000000},"warnings":["1 of 10 runs are statistical outliers"],"#, "");
        let fast = format!(r#","rank":1,"precision":"fp32",{},{}"#, stats(10.0), accuracy(true));
        let wrong = format!(
            r#","reason":"output \"y\" is too far","precision":"fp32",{},{}"#,
            stats(1.0),
            accuracy(false)
        );
        let rows = [
            row("slow", "ok", &slow),
            row("fast", "ok", &fast),
            row("wrong", "inaccurate", &wrong),
            row("away", "absent", r#","reason":"away: the runtime, \"x\", is not installed""#),
        ]
        .join(",");
        let json = format!(
            r#"{{"schema_version":1,"sdrun_version":"0.1.0","unix_time":1,
            "environment":{{"os":"linux","arch":"x86_64","cpu":"CPU","cores":4,"memory_bytes":8000000000}},
            "cases":[{{"model":"m|1","topology":"t","precision":"fp32","shapes":{{"x":[1,2]}},"inputs_sha256":"h",
            "reference":"ref","rows":[{rows}]}}]}}"#
        );
        serde_json::from_str(&json).unwrap()
    }

    #[test]
    fn ranked_rows_come_first_and_reasons_follow() {
        let report = report();
        let mut out = Vec::new();
        show(&mut out, &report).unwrap();
        let text = String::from_utf8(out).unwrap();
        let place = |what: &str| text.find(what).unwrap_or_else(|| panic!("{what:?} is not in\n{text}"));
        let order = ["m|1, fp32, x [1, 2], compared with ref", "fast", "slow", "wrong", "away"].map(place);
        assert!(order.is_sorted(), "{text}");
        for cell in
            ["#1", "#2", "10.0", "20.0", "12.5", "1.23", "2.50", "0.999998 / 1.2e-4", "INACCURATE", "absent"]
        {
            place(cell);
        }
        place("  wrong: output \"y\" is too far");
        place("  away: the runtime, \"x\", is not installed");
    }
}

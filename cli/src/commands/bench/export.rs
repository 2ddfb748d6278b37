//! Bench reports as CSV and Markdown.

use super::table;
use sdrun::bench::{Report, Row};
use std::io::{self, Write};

const COLUMNS: [&str; 22] = [
    "model",
    "topology",
    "case_precision",
    "provider",
    "status",
    "reason",
    "rank",
    "device",
    "runtime",
    "precision",
    "init_seconds",
    "build_seconds",
    "engine_bytes",
    "load_seconds",
    "refit_seconds",
    "first_run_ms",
    "runs",
    "median_ms",
    "p95_ms",
    "peak_bytes",
    "cosine",
    "relative_error",
];

/// One line per row (RFC 4180, with plain newlines). Unknown values are empty.
pub(super) fn csv(mut out: impl Write, report: &Report) -> io::Result<()> {
    writeln!(out, "{}", COLUMNS.join(","))?;
    for case in &report.cases {
        for row in &case.rows {
            let head = [case.model.clone(), case.topology.clone(), case.precision.clone()];
            let fields: Vec<String> = head.into_iter().chain(fields(row)).map(|f| quoted(&f)).collect();
            writeln!(out, "{}", fields.join(","))?;
        }
    }
    Ok(())
}

fn fields(row: &Row) -> [String; 19] {
    fn text<T: ToString>(value: Option<T>) -> String {
        value.map_or(String::new(), |v| v.to_string())
    }
    let stats = row.stats.as_ref();
    let worst = row.accuracy.as_ref().map(|a| &a.worst);
    [
        row.provider.clone(),
        crate::format::word(&row.status),
        text(row.reason.as_ref()),
        text(row.rank),
        text(row.device.as_ref()),
        text(row.runtime.as_ref().map(|r| format!("{} {}", r.name, r.version))),
        text(row.precision.as_ref()),
        text(row.init_seconds),
        text(row.build_seconds),
        text(row.engine_bytes),
        text(row.load_seconds),
        text(row.refit.as_ref().map(|r| r.seconds)),
        text(row.first_run_ms),
        text(stats.map(|s| s.runs)),
        text(stats.map(|s| s.median_ms)),
        text(stats.map(|s| s.p95_ms)),
        text(row.memory.peak_bytes()),
        text(worst.map(|w| w.cosine)),
        text(worst.map(|w| w.relative_error)),
    ]
}

fn quoted(field: &str) -> String {
    if field.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", field.replace('"', "\"\""))
    } else {
        field.into()
    }
}

/// A heading, a table and remarks per case.
pub(super) fn markdown(report: &Report) -> String {
    let mut text = String::new();
    for case in &report.cases {
        text += &format!("### {}\n\n{}\n\n", table::title(case), table::markdown_table(case));
        for remark in table::remarks(case) {
            text += &format!("- {remark}\n");
        }
        text += "\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn csv_lines_have_every_column() {
        let mut out = Vec::new();
        csv(&mut out, &table::tests::report()).unwrap();
        let text = String::from_utf8(out).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 5);
        assert_eq!(lines[0].split(',').count(), COLUMNS.len());
        assert_eq!(
            lines[1],
            "m|1,t,fp32,slow,ok,,2,,,fp32,,1.234,2500000,0.5,,30,10,20,12.5,,0.999998,0.00012"
        );
        // A comma and quotes inside.
        assert!(
            lines[4].starts_with(r#"m|1,t,fp32,away,absent,"away: the runtime, ""x"", is not installed",,"#),
            "{}",
            lines[4]
        );
    }

    #[test]
    fn markdown_has_one_table_row_for_each_provider() {
        let text = markdown(&table::tests::report());
        assert_eq!(text.lines().filter(|l| l.starts_with('|')).count(), 2 + 4, "{text}");
        assert!(text.contains("- wrong: output"), "{text}");
    }
}

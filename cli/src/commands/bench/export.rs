//! Bench reports as files.

use super::table;
use crate::{files, format};
use clap::ValueEnum;
use comfy_table::presets;
use sdrun::bench::{Report, Row};
use std::{
    collections::BTreeSet,
    io::{self, Write},
    path::{Path, PathBuf},
};

/// The format of a report's file.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    Html,
    Json,
    Csv,
    Md,
}

/// The page around a report; it shows the JSON document that takes the place of `{}`.
const PAGE: [&str; 2] = [include_str!("page/before.html"), include_str!("page/after.html")];

impl Format {
    /// The file of this format beside `stem`.
    pub(super) fn file(self, stem: &Path) -> PathBuf {
        let ending = match self {
            Format::Html => ".html",
            Format::Json => ".json",
            Format::Csv => ".csv",
            Format::Md => ".md",
        };
        files::with_ending(stem, ending)
    }

    /// Writes a report, replacing an earlier one as a whole.
    pub(super) fn write(self, path: &Path, report: &Report) -> anyhow::Result<()> {
        let json = |spaced: bool| match spaced {
            true => serde_json::to_string_pretty(report),
            false => serde_json::to_string(report),
        };
        match self {
            Format::Html => {
                // `</script>` in a text would end the element that holds it.
                let document = json(false)?.replace("</", "<\\/");
                files::write(path, |out| out.write_all(PAGE.join(&document).as_bytes()))
            }
            Format::Json => {
                let document = json(true)? + "\n";
                files::write(path, |out| out.write_all(document.as_bytes()))
            }
            Format::Csv => files::write(path, |out| csv(out, report)),
            Format::Md => files::write(path, |out| out.write_all(markdown(report).as_bytes())),
        }
    }
}

const COLUMNS: [&str; 27] = [
    "model",
    "topology",
    "case_precision",
    "system",
    "kind",
    "status",
    "reason",
    "rank",
    "device",
    "runtime",
    "precision",
    "settings",
    "init_seconds",
    "build_seconds",
    "engine_bytes",
    "load_seconds",
    "refit_seconds",
    "first_run_ms",
    "runs",
    "median_ms",
    "p95_ms",
    "versus_best",
    "versus_low",
    "versus_high",
    "peak_bytes",
    "cosine",
    "relative_error",
];

/// One line per row (RFC 4180, with plain newlines). Unknown values are empty; control characters in texts become `?`.
fn csv(mut out: impl Write, report: &Report) -> io::Result<()> {
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

fn fields(row: &Row) -> [String; 24] {
    fn text<T: ToString>(value: Option<T>) -> String {
        value.map_or(String::new(), |v| v.to_string())
    }
    let stats = row.stats.as_ref();
    let worst = row.accuracy.as_ref().map(|a| &a.worst);
    [
        row.system.clone(),
        format::word(&row.kind),
        format::word(&row.status),
        text(row.reason.as_ref()),
        text(row.rank),
        text(row.device.as_ref().map(|device| &device.name)),
        text(row.runtime.as_ref().map(|r| format!("{} {}", r.name, r.version))),
        text(row.precision.as_ref()),
        row.settings.join(", "),
        text(row.init_seconds),
        text(row.build_seconds),
        text(row.engine_bytes),
        text(row.load_seconds),
        text(row.refit.as_ref().map(|r| r.seconds)),
        text(row.first_run_ms),
        text(stats.map(|s| s.runs)),
        text(stats.map(|s| s.median_ms)),
        text(stats.and_then(|s| s.p95_ms)),
        text(row.versus_best.map(|v| v.ratio)),
        text(row.versus_best.map(|v| v.low)),
        text(row.versus_best.map(|v| v.high)),
        text(row.memory.peak_bytes()),
        text(worst.map(|w| w.cosine)),
        text(worst.map(|w| w.relative_error)),
    ]
}

fn quoted(field: &str) -> String {
    let field = format::line(field);
    if field.contains([',', '"']) { format!("\"{}\"", field.replace('"', "\"\"")) } else { field.into() }
}

/// A heading, a table and remarks per case.
fn markdown(report: &Report) -> String {
    let mut text = String::new();
    let mut said = BTreeSet::new();
    for case in &report.cases {
        text += &format!("### {}\n\n{}\n\n", table::title(case), table::markdown_table(case));
        for remark in table::remarks(case, &mut said) {
            text += &format!("- {}\n", format::line(&remark));
        }
        text += "\n";
    }
    for table::Scaling { title, mut table } in table::scaling(report) {
        table.load_style(presets::ASCII_MARKDOWN);
        text += &format!("### {title}\n\n{table}\n\n");
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
            "m|1,t,fp32,slow,provider,ok,,2,,,fp32,\"2 threads, a=b\",,1.234,2500000,0.5,,30,10,20,12.5,2,1.9,2.1,,0.999998,0.00012"
        );
        // A comma and quotes inside.
        assert!(
            lines[4].starts_with(
                r#"m|1,t,fp32,away,provider,absent,"away: the runtime, ""x"", is not installed",,"#
            ),
            "{}",
            lines[4]
        );
    }

    #[test]
    fn names_stay_within_their_cell() {
        let mut report = table::tests::report();
        report.cases[0].rows[0].settings = vec!["a|b\nc\u{1b}".into()];
        let text = markdown(&report);
        assert!(text.contains("a\\|b c?"), "{text}");
        let mut out = Vec::new();
        csv(&mut out, &report).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(text.lines().count(), 5);
        assert!(text.contains("a|b c?"), "{text}");
    }

    #[test]
    fn markdown_has_one_table_row_for_each_provider() {
        let text = markdown(&table::tests::report());
        assert_eq!(text.lines().filter(|l| l.starts_with('|')).count(), 2 + 4, "{text}");
        assert!(text.contains("- wrong: output"), "{text}");
    }
}

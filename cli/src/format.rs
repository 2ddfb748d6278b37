//! Human-readable numbers, names and tables.

use comfy_table::{CellAlignment, ContentArrangement, LineStyle, Table, TableStyle};
use sdrun::{abi::RefitReport, bench::Refit};
use serde::Serialize;
use std::borrow::Cow;

/// Replaces control characters except newline and tab by `?`, so that text cannot control the terminal, and those that change the
/// direction of writing, so that it reads as it is. Names in models, manifests and messages of vendor libraries are untrusted.
pub(crate) fn clean(text: &str) -> Cow<'_, str> {
    let harms = |c: char| harmful(c) && !BREAKS.contains(&c);
    if text.contains(harms) { text.replace(harms, "?").into() } else { text.into() }
}

/// Also makes spaces of newlines and tabs: a name in a line must not look like further lines.
pub(crate) fn line(text: &str) -> Cow<'_, str> {
    let text = clean(text);
    if text.contains(BREAKS) { text.replace(BREAKS, " ").into() } else { text }
}

const BREAKS: [char; 2] = ['\n', '\t'];

fn harmful(c: char) -> bool {
    // Marks, embeddings, overrides and isolates of direction, and separators of lines.
    let turns =
        matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || turns
}

/// `1.23 GB`, in powers of 1000.
pub(crate) fn bytes(n: u64) -> String {
    let units = ["B", "kB", "MB", "GB", "TB"];
    let mut value = n as f64;
    let mut unit = 0;
    // 999.5 would round to 1000.
    while value >= 999.5 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{} {}", three_digits(value), units[unit]) }
}

/// Bytes in MB, without the unit.
pub(crate) fn megabytes(n: u64) -> String {
    three_digits(n as f64 / 1e6)
}

/// `12.3 s`, `850 ms`, `2 h 5 min`.
pub(crate) fn seconds(s: f64) -> String {
    match s {
        s if s < 0.9995 => format!("{} ms", three_digits(s * 1e3)),
        s if s < 120.0 => format!("{} s", three_digits(s)),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{} h {} min", (s / 3600.0).floor(), ((s % 3600.0) / 60.0).floor()),
        s => format!("{:.0} days", s / 86_400.0),
    }
}

/// At least three significant digits, without an exponent.
pub(crate) fn three_digits(v: f64) -> String {
    match v.abs() {
        a if a >= 99.95 => format!("{v:.0}"),
        a if a >= 9.995 => format!("{v:.1}"),
        a if a >= 0.9995 || a == 0.0 => format!("{v:.2}"),
        _ => format!("{v:.3}"),
    }
}

/// `[1, 4, ?, 64]`.
pub(crate) fn dims(shape: &[Option<usize>]) -> String {
    let dims: Vec<String> = shape.iter().map(|d| d.map_or("?".into(), |d| d.to_string())).collect();
    format!("[{}]", dims.join(", "))
}

/// `a, b, c`, or `none`.
pub(crate) fn list<S: AsRef<str>>(items: impl IntoIterator<Item = S>) -> String {
    let items: Vec<S> = items.into_iter().collect();
    if items.is_empty() {
        return "none".into();
    }
    items.iter().map(|item| line(item.as_ref())).collect::<Vec<_>>().join(", ")
}

/// The name serde gives a plain variant: `gpu`, `in_place`.
pub(crate) fn word(value: &impl Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|v| Some(v.as_str()?.replace('_', " "))).unwrap_or_default()
}

/// Reports how long it took to apply adapters, and with which method.
pub(crate) fn refit(refit: &Refit) -> String {
    let RefitReport { method, tensors, bytes: size, .. } = &refit.report;
    format!(
        "adapters applied in {} ({}, {tensors} tensors, {})",
        seconds(refit.seconds),
        word(method),
        bytes(*size)
    )
}

/// The only line is below the header.
const PLAIN: TableStyle = TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

/// A table with a header. It is at most as wide as the terminal; in a pipe, its width is unlimited.
pub(crate) fn table<S: AsRef<str>>(header: impl IntoIterator<Item = S>) -> Table {
    let mut table = Table::new();
    table.load_style(PLAIN);
    table.set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header(header.into_iter().map(|s| s.as_ref().to_string()));
    table
}

/// Right-aligns columns of numbers.
pub(crate) fn right(table: &mut Table, columns: std::ops::Range<usize>) {
    for index in columns {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_replaced() {
        assert_eq!(clean("a\x1b[2Jb\u{9b}1mc\x7f\r\n\td"), "a?[2Jb?1mc??\n\td");
        assert_eq!(clean("a\u{202e}gpj\u{2066}.\u{2028}"), "a?gpj?.?");
        assert!(matches!(clean("plain ü 漢\n"), Cow::Borrowed(_)));
        assert_eq!(line("a\nerror: b\t"), "a error: b ");
        assert_eq!(list(["a\nb", "c"]), "a b, c");
    }

    #[test]
    fn sizes_and_times() {
        for (n, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.00 kB"),
            (999_499, "999 kB"),
            (999_500, "1.00 MB"),
            (3_438_000_000, "3.44 GB"),
            (u64::MAX, "18446744 TB"),
        ] {
            assert_eq!(bytes(n), text);
        }
        for (s, text) in [
            (0.0, "0.00 ms"),
            (0.0123, "12.3 ms"),
            (0.9999, "1.00 s"),
            (59.96, "60.0 s"),
            (119.0, "119 s"),
            (600.0, "10 min"),
            (7500.0, "2 h 5 min"),
            (864_000.0, "10 days"),
        ] {
            assert_eq!(seconds(s), text);
        }
    }
}

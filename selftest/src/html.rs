//! A report as a page: one file without scripts, with the report itself as JSON inside.

use crate::{Network, Report, Sample, State, Subject};
use std::fmt::Write;

const STYLE: &str = include_str!("page.css");

/// The page.
pub fn page(report: &Report) -> String {
    let mut page = String::new();
    // Writing to a string cannot fail.
    let _ = write(&mut page, report);
    page
}

fn write(out: &mut String, report: &Report) -> std::fmt::Result {
    let environment = &report.environment;
    writeln!(out, "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">")?;
    writeln!(out, "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">")?;
    writeln!(
        out,
        "<title>sdrun self-test</title>\n<style>\n{STYLE}</style>\n<main>\n<h1>sdrun self-test</h1>"
    )?;
    let verdict = match (report.passed(), report.count(State::Failed)) {
        (true, _) => "Nothing failed".to_string(),
        (false, 1) => "1 check failed".into(),
        (false, count) => format!("{count} checks failed"),
    };
    writeln!(
        out,
        "<p class=\"verdict {}\">{verdict}: {} passed, {} not offered, {} not run, in {:.0} s.</p>",
        if report.passed() { "passed" } else { "failed" },
        report.count(State::Passed),
        report.count(State::NotOffered),
        report.count(State::NotRun),
        report.seconds
    )?;
    writeln!(out, "<p>This file holds no user names, folders or serial numbers. It is safe to send.</p>")?;
    let memory = environment.memory_bytes.map_or("unknown".into(), gigabytes);
    let facts = [
        ("sdrun", report.sdrun.clone()),
        (
            "System",
            format!(
                "{} {}, {}",
                environment.os,
                environment.os_version.as_deref().unwrap_or(""),
                environment.arch
            ),
        ),
        (
            "Processor",
            format!(
                "{}, {} logical processors",
                environment.cpu.as_deref().unwrap_or("unknown"),
                environment.cores
            ),
        ),
        ("Instructions", environment.instruction_sets.join(" ")),
        ("Memory", memory),
        (
            "Graphics",
            match environment.gpus.is_empty() {
                true => "none found".into(),
                false => environment.gpus.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "),
            },
        ),
    ];
    list(out, &facts)?;
    for subject in &report.subjects {
        section(out, subject)?;
    }
    if !report.absent.is_empty() {
        writeln!(out, "<h2>Not checked</h2>\n<ul>")?;
        for absent in &report.absent {
            writeln!(out, "<li>{}</li>", text(&absent.reason))?;
        }
        writeln!(out, "</ul>")?;
    }
    // `</script>` in a text would end the element that holds it.
    let json = serde_json::to_string(report).unwrap_or_default().replace("</", "<\\/");
    writeln!(out, "</main>\n<script type=\"application/json\" id=\"report\">{json}</script>\n</html>")
}

fn section(out: &mut String, subject: &Subject) -> std::fmt::Result {
    writeln!(out, "<section>\n<h2>{} on {}</h2>", text(&subject.provider), text(&subject.device.name))?;
    let facts = [
        ("Runtime", format!("{} {}", subject.runtime.0, subject.runtime.1)),
        ("Provider", subject.build_id.clone()),
        ("Device", format!("{}, {}", subject.device.id, subject.device.class)),
        ("Device memory", subject.device.memory_bytes.map_or("unknown".into(), gigabytes)),
    ];
    list(out, &facts)?;
    writeln!(out, "<h3>What it does</h3>\n<table><tr><th>Check<th>Result<th>Found<th class=\"n\">Time</tr>")?;
    for check in &subject.checks {
        let (name, detail) = (text(&check.name), text(&check.detail));
        writeln!(
            out,
            "<tr><td>{name}{}<td>{detail}<td class=\"n\">{:.1} s</tr>",
            mark(check.state),
            check.seconds
        )?;
    }
    writeln!(out, "</table>")?;
    if !subject.pictures.is_empty() {
        writeln!(out, "<h3>Pictures</h3>\n<div class=\"pictures\">")?;
        subject.pictures.iter().try_for_each(|sample| picture(out, sample))?;
        writeln!(out, "</div>")?;
    }
    if !subject.networks.is_empty() {
        writeln!(
            out,
            "<h3>What it computes</h3>\n<p>Built-in networks with generated weights, at small sizes, against stored outputs.</p>"
        )?;
        writeln!(
            out,
            "<table><tr><th>Network<th>Input<th>Precision<th>Result<th class=\"n\">Cosine<th class=\"n\">Error<th class=\"n\">Build<th class=\"n\">Load<th class=\"n\">First run<th class=\"n\">Run<th class=\"n\">Peak memory</tr>"
        )?;
        subject.networks.iter().try_for_each(|network| row(out, network))?;
        writeln!(out, "</table>")?;
    }
    if !subject.log.is_empty() {
        writeln!(
            out,
            "<details><summary>Log ({} lines)</summary><pre>{}</pre></details>",
            subject.log.len(),
            text(&subject.log.join("\n"))
        )?;
    }
    writeln!(out, "</section>")
}

fn row(out: &mut String, network: &Network) -> std::fmt::Result {
    let number = |value: Option<f64>, digits: usize, unit: &str| {
        value.map_or(String::new(), |value| format!("{value:.digits$} {unit}"))
    };
    let shape = network.shape.iter().map(ToString::to_string).collect::<Vec<_>>().join("×");
    let worst = network.worst.as_ref();
    writeln!(
        out,
        "<tr><td>{}<td>{shape}<td>{}{}<td class=\"n\">{}<td class=\"n\">{}<td class=\"n\">{}<td class=\"n\">{}<td class=\"n\">{}<td class=\"n\">{}<td class=\"n\">{}</tr>",
        text(&network.model),
        network.precision,
        mark(network.state),
        worst.map_or(String::new(), |worst| format!("{:.6}", worst.cosine)),
        worst.map_or(String::new(), |worst| format!("{:.1e}", worst.relative_error)),
        number(network.build_seconds, 2, "s"),
        number(network.load_seconds, 2, "s"),
        number(network.first_run_ms, 1, "ms"),
        number(network.run_ms, 1, "ms"),
        network.peak_bytes.map_or(String::new(), gigabytes),
    )?;
    match &network.reason {
        Some(reason) => writeln!(out, "<tr class=\"reason\"><td colspan=\"11\">{}</tr>", text(reason)),
        None => Ok(()),
    }
}

fn picture(out: &mut String, sample: &Sample) -> std::fmt::Result {
    let (prompt, precision) = (text(&sample.prompt), sample.precision);
    let state = if sample.right { "✓" } else { "✗ wrong" };
    writeln!(
        out,
        "<figure><img alt=\"{prompt}\" width=\"64\" height=\"64\" src=\"data:image/png;base64,{}\"><figcaption>{prompt}, {precision} {state}</figcaption></figure>",
        sample.png
    )
}

fn list(out: &mut String, facts: &[(&str, String)]) -> std::fmt::Result {
    writeln!(out, "<dl>")?;
    for (name, fact) in facts {
        writeln!(out, "<dt>{name}<dd>{}", text(fact))?;
    }
    writeln!(out, "</dl>")
}

/// A cell with a state, told by a word and a sign, not by colour alone.
fn mark(state: State) -> String {
    let (class, words) = match state {
        State::Passed => ("passed", "✓ passed"),
        State::Failed => ("failed", "✗ failed"),
        State::NotOffered => ("other", "– not offered"),
        State::NotRun => ("other", "– not run"),
    };
    format!("<td class=\"{class}\">{words}")
}

fn gigabytes(bytes: u64) -> String {
    format!("{:.2} GB", bytes as f64 / 1e9)
}

/// Text in HTML.
fn text(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

//! `sdrun serve` under load: the tests' example `serve_load`.

use super::{Lab, Line, Outcome, median};
use serde_json::Value;

pub(super) fn serve(lab: &Lab<'_>) -> Outcome {
    let measured = lab.example("serve_load", &[])?;
    let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
    let load = &measured["load"];
    let mut lines = vec![Line::new(
        format!(
            "`sdrun serve`, 8 clients, {} pictures of different sizes and LoRAs, {} cancelled jobs between them: wrong pictures",
            load["requests"], load["cancelled"]
        ),
        format!("{} in {:.0} s", load["wrong"], number(&load["seconds"])),
        "0",
    )];
    let memory = measured["memory"].as_array().map_or(&[][..], Vec::as_slice);
    let at = |pictures: u64| {
        let found = memory.iter().find(|one| one["pictures"] == pictures);
        found.map_or(f64::NAN, |one| number(&one["bytes"]))
    };
    lines.push(Line::new(
        "its memory after 1000 pictures / after 200",
        format!("{:.1} / {:.1} MB = {:.2}", at(1000) / 1e6, at(200) / 1e6, at(1000) / at(200)),
        "flat",
    ));
    let rounds = measured["pace"].as_array().map_or(&[][..], Vec::as_slice);
    let ratios: Vec<f64> =
        rounds.iter().map(|round| number(&round["served"]) / number(&round["generated"])).collect();
    let each = median(&rounds.iter().map(|round| number(&round["served"])).collect::<Vec<_>>());
    lines.push(Line::new(
        "a picture of the demo model by `sdrun serve` / by `sdrun generate`",
        format!("{:.3} ({:.0} ms)", median(&ratios), each * 1e3),
        "≤ 1.02",
    ));
    Ok((measured, lines))
}

//! The option tables of docs/cli.md, generated from the definition of the command line.

use crate::cli::Cli;
use clap::{Arg, Command, CommandFactory};
use std::{collections::BTreeMap, fmt::Write, path::Path};

const BEGIN: &str = "<!-- options: generated, do not edit -->\n";
const END: &str = "<!-- end of options -->\n";

/// One row: an option, the commands that have it, and its help.
struct Row {
    option: String,
    commands: Vec<String>,
    means: String,
}

/// `-p, --provider <ID>`
fn spelling(arg: &Arg) -> String {
    let names = arg.get_value_names().unwrap_or_default().iter().map(|name| name.to_string());
    let takes = arg.get_action().takes_values();
    let values: Vec<String> = if takes { names.collect() } else { Vec::new() };
    let mut text = arg.get_short().map_or(String::new(), |short| format!("-{short}, "));
    let _ = write!(text, "--{}", arg.get_long().unwrap_or_default());
    if !values.is_empty() {
        let values = values.join(" ");
        let optional = arg.get_num_args().is_some_and(|count| count.min_values() == 0);
        let _ = match (optional, arg.is_require_equals_set()) {
            (true, _) => write!(text, "[={values}]"),
            (false, true) => write!(text, "={values}"),
            (false, false) => write!(text, " {values}"),
        };
    }
    text
}

fn collect(command: &Command, path: &str, tables: &mut BTreeMap<String, Vec<Row>>) {
    for arg in command.get_arguments().filter(|arg| !arg.is_positional() && !arg.is_hide_set()) {
        let global = arg.is_global_set();
        if global && !path.is_empty() || ["help", "version"].contains(&arg.get_id().as_str()) {
            continue;
        }
        let heading = match arg.get_help_heading() {
            Some(heading) if heading != "Options" => heading.to_string(),
            _ => format!("`sdrun {path}`"),
        };
        let mut means = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let defaults: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
        if !defaults.is_empty() && arg.get_action().takes_values() {
            let _ = write!(means, " [default: {}]", defaults.join(", "));
        }
        let row =
            Row { option: spelling(arg), commands: vec![path.to_string()], means: means.replace('|', "\\|") };
        let rows = tables.entry(heading).or_default();
        match rows.iter_mut().find(|known| known.option == row.option && known.means == row.means) {
            Some(known) => known.commands.push(path.to_string()),
            None => rows.push(row),
        }
    }
    for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
        let name = format!("{path} {}", sub.get_name());
        collect(sub, name.trim(), tables);
    }
}

/// All tables, as Markdown.
fn tables() -> String {
    let mut command = Cli::command();
    command.build();
    let mut tables = BTreeMap::new();
    collect(&command, "", &mut tables);
    let mut text = String::new();
    // Shared options first, then those of single commands.
    let (own, shared): (Vec<_>, Vec<_>) =
        tables.into_iter().partition(|(heading, _)| heading.starts_with('`'));
    for (heading, rows) in shared.into_iter().chain(own) {
        let several = rows.iter().any(|row| row.commands.len() > 1 || !heading.contains(&row.commands[0]));
        let of = several && rows.iter().any(|row| !row.commands[0].is_empty());
        let _ = writeln!(text, "\n### {heading}\n");
        let _ = writeln!(
            text,
            "{}",
            if of {
                "| option | commands | meaning |\n|---|---|---|"
            } else {
                "| option | meaning |\n|---|---|"
            }
        );
        for Row { option, commands, means } in rows {
            let option = option.replace('|', "\\|");
            let _ = match of {
                true => writeln!(text, "| `{option}` | {} | {means} |", commands.join(", ")),
                false => writeln!(text, "| `{option}` | {means} |"),
            };
        }
    }
    text + "\n"
}

/// `SDRUN_BLESS=1 cargo test -p sdrun-cli manual` rewrites the tables.
#[test]
fn option_tables_match_the_program() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/cli.md");
    let manual = std::fs::read_to_string(&file).unwrap();
    let (before, rest) = manual.split_once(BEGIN).expect("docs/cli.md has a place for the tables");
    let (found, after) = rest.split_once(END).expect("the tables have an end");
    let expected = tables();
    if std::env::var_os("SDRUN_BLESS").is_some() {
        std::fs::write(&file, format!("{before}{BEGIN}{expected}{END}{after}")).unwrap();
    } else {
        assert!(
            found == expected,
            "the options have changed (SDRUN_BLESS=1 writes docs/cli.md):\n{expected}"
        );
    }
}

//! Summarizes in one sentence everything in a model that the ONNX parser rejects.

use sdrun_abi::{Error, ErrorCode};

/// Number of nodes that the sentence names for each operator and reason; the log has all of them.
const NAMED: usize = 3;

/// `nvonnxparser::ErrorCode::kMEM_ALLOC_FAILED`.
const NO_MEMORY: i32 = 2;

const UNSUPPORTED: &str = "is not supported";

/// One fault, as `nvonnxparser::IParserError` states it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Fault {
    /// `nvonnxparser::ErrorCode`.
    pub(crate) code: i32,
    /// Operator; empty if the parser does not report it.
    pub(crate) op: String,
    /// Name of the node; may be empty.
    pub(crate) node: String,
    /// The library's message, shortened.
    pub(crate) words: String,
}

impl Fault {
    /// The operator and why it is rejected.
    fn reason(&self) -> (&str, &str) {
        // Users cannot make sense of conditions from the library's source code.
        let words = self.words.strip_prefix("Assertion failed: ").unwrap_or(&self.words);
        let words = words.strip_prefix("false: ").unwrap_or(words);
        let words = words.strip_prefix(&format!("Invalid Node - {}", self.node)).unwrap_or(words);
        let words = words.trim_start_matches([':', ' ']).trim_start_matches(&format!("{}: ", self.node));
        match words {
            "" | "false" => (&self.op, UNSUPPORTED),
            words if words.contains("Plugin not found") => (&self.op, UNSUPPORTED),
            words => (&self.op, words),
        }
    }

    /// A line of the log.
    pub(crate) fn line(&self) -> String {
        let (op, reason) = self.reason();
        format!("{op} node `{}`: {reason}", self.node)
    }
}

/// Fills in the operator of a fault without one from the library's log: "In function importScatterElements".
pub(crate) fn complete(faults: &mut [Fault], logged: Option<&str>) {
    let op = logged.and_then(|text| text.split("In function import").nth(1));
    let op = op.and_then(|rest| rest.split(|c: char| !c.is_alphanumeric()).next()).unwrap_or_default();
    for fault in faults.iter_mut().filter(|fault| fault.op.is_empty()) {
        fault.op = op.to_owned();
    }
}

/// The error for a model with these faults; `logged` is the library's message if there are none.
pub(crate) fn refusal(faults: &[Fault], logged: Option<&str>) -> Error {
    // In graph order; faults with the same operator and reason are grouped.
    let mut groups: Vec<(&str, &str, Vec<&str>)> = Vec::new();
    for fault in faults {
        let (op, reason) = fault.reason();
        match groups.iter_mut().find(|(o, r, _)| (*o, *r) == (op, reason)) {
            Some((_, _, nodes)) => nodes.push(&fault.node),
            None => groups.push((op, reason, vec![&fault.node])),
        }
    }
    let list: Vec<String> = groups.iter().map(|(op, reason, nodes)| group(op, reason, nodes)).collect();
    let words = match list.is_empty() {
        true => logged.unwrap_or("no reason is given").to_owned(),
        // The check before parsing reports all nodes at once. Parsing itself reports only the first fault.
        false if faults.len() == 1 && groups[0].1 != UNSUPPORTED => {
            format!("{}; it stops at the first such node", list[0])
        }
        false => list.join("; "),
    };
    // The host has read, checked and written the model. If the parser rejects it, the library does not support it.
    let no_memory = faults.iter().any(|fault| fault.code == NO_MEMORY);
    let code = if no_memory { ErrorCode::ResourceExhausted } else { ErrorCode::Unimplemented };
    Error::new(code, format!("TensorRT-RTX cannot read the model: {words}"))
}

fn group(op: &str, reason: &str, nodes: &[&str]) -> String {
    let named: Vec<String> =
        nodes.iter().filter(|n| !n.is_empty()).take(NAMED).map(|n| format!("`{n}`")).collect();
    let more = match (nodes.len() - named.len(), named.is_empty()) {
        (0, _) | (1, true) => String::new(),
        (n, true) => format!("{n} nodes"),
        (n, false) => format!(" and {n} more"),
    };
    let place = format!("{}{more}", named.join(", "));
    let colon = if reason == UNSUPPORTED { " " } else { ": " };
    match (op.is_empty(), place.is_empty()) {
        (true, true) => reason.to_owned(),
        (true, false) => format!("{reason} (nodes {place})"),
        (false, true) => format!("operator {op}{colon}{reason}"),
        (false, false) => format!("operator {op}{colon}{reason} ({place})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(op: &str, node: &str, words: &str) -> Fault {
        Fault { code: 8, op: op.into(), node: node.into(), words: words.into() }
    }

    #[test]
    fn all_nodes_are_in_one_sentence() {
        let plugin = "creator && \"Plugin not found, are the plugin name, version, and namespace correct?\"";
        let mut faults =
            vec![fault("DynamicQuantizeLinear", "q1", "false"), fault("ConvInteger", "c1", "false")];
        faults.extend((2..6).map(|i| fault("DynamicQuantizeLinear", &format!("q{i}"), "false")));
        faults.push(fault("DynamicQuantizeLSTM", "lstm", plugin));
        faults.push(fault("Loop", "", "Assertion failed: false: no trip limit was set"));
        let error = refusal(&faults, Some("something else"));
        assert_eq!(error.code, ErrorCode::Unimplemented);
        assert_eq!(
            error.message,
            "TensorRT-RTX cannot read the model: operator DynamicQuantizeLinear is not supported (`q1`, `q2`, `q3` \
             and 2 more); operator ConvInteger is not supported (`c1`); operator DynamicQuantizeLSTM is not supported \
             (`lstm`); operator Loop: no trip limit was set"
        );
        assert_eq!(faults[0].line(), "DynamicQuantizeLinear node `q1`: is not supported");
    }

    #[test]
    fn the_librarys_names_are_not_repeated() {
        let words = "Invalid Node - dq: dq: input has type Int32 but must have type Int8";
        let error = refusal(&[fault("DequantizeLinear", "dq", words)], None);
        let expected = "operator DequantizeLinear: input has type Int32 but must have type Int8 (`dq`); it stops at the first such node";
        assert!(error.message.ends_with(expected), "{error}");
    }

    #[test]
    fn an_operator_that_the_parser_does_not_name_is_in_the_log() {
        let mut faults = [fault("", "", "Unsupported reduction type")];
        let logged = "ModelImporter.cpp:151: ERROR: onnxOpImporters.cpp:7476 In function importScatterElements:\n[9] …";
        complete(&mut faults, Some(logged));
        let error = refusal(&faults, Some(logged));
        assert!(
            error.message.ends_with(
                "operator ScatterElements: Unsupported reduction type; it stops at the first such node"
            ),
            "{error}"
        );
        complete(&mut faults, None);
        assert_eq!(faults[0].op, "ScatterElements");
        assert!(refusal(&[], Some("odd")).message.ends_with("model: odd"));
        assert!(refusal(&[], None).message.ends_with("no reason is given"));
        let full = Fault { code: NO_MEMORY, ..Fault::default() };
        assert_eq!(refusal(&[full], None).code, ErrorCode::ResourceExhausted);
    }
}

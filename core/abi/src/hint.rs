use crate::Precision;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Value, json};
use std::fmt;

/// What to do about an [`Error`](crate::Error).
///
/// A hint states the action and leaves the wording to the program. `Display` writes neutral English. A host with
/// wording of its own (flags, buttons) replaces it with [`render`](Hint::render).
///
/// In JSON, a hint is a string, or an object with `kind`, the fields of the variant, and `text`, the neutral English.
/// A reader that does not recognize the kind shows the text.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Hint {
    /// A sentence in plain English, without the flags of any program.
    Text(String),
    /// Install a vendor runtime.
    Install {
        /// Its name.
        runtime: String,
    },
    /// Compute in one of these other precisions.
    UsePrecision(Vec<Precision>),
    /// Use another provider: this one, or any if `None`.
    UseProvider(Option<String>),
    /// Use another device: one of these ids, or any if the list is empty.
    UseDevice(Vec<String>),
    /// Give the shape of an input, or of every input if `None`.
    GiveShape {
        /// The input.
        input: Option<String>,
    },
    /// Give an ONNX model.
    GiveModel,
    /// Give weights: a checkpoint, or the model that includes them.
    GiveWeights,
    /// Store the weights in the engine.
    Bake,
    /// Build the engine again.
    Rebuild,
    /// Run the provider in a worker process.
    Isolate,
    /// Leave out an option of the build: a field of [`BuildSpec`](crate::BuildSpec), for example `bake`.
    LeaveOut {
        /// The field.
        option: String,
    },
    /// Leave out the parts of weights or adapters that do not fit.
    Lenient,
    /// Free memory.
    FreeMemory {
        /// How many bytes are missing, if known.
        bytes: Option<u64>,
    },
    /// Look at what a model or a file of weights holds.
    Inspect,
    /// Build the engine first.
    Build,
    /// List the providers that were found, where they are, and why some are not used.
    ListProviders,
    /// Check the installation: folders, providers, runtimes.
    CheckInstallation,
    /// Match the model's weights to a checkpoint's tensors by their values. That takes the checkpoint that the model was
    /// exported from.
    BindByValue,
    /// Say which part of the pipeline the model is.
    NamePart,
    /// Give the file as an adapter.
    UseAsAdapter,
    /// Any one of these helps.
    AnyOf(Vec<Hint>),
    /// All of these, in order.
    All(Vec<Hint>),
}

impl Hint {
    /// Formats the hint. `own` may supply the wording of any part; if it returns `None`, the part is in neutral
    /// English.
    pub fn render(&self, own: &dyn Fn(&Hint) -> Option<String>) -> String {
        let join = |parts: &[Hint], between: &str| {
            parts.iter().map(|part| part.render(own)).collect::<Vec<_>>().join(between)
        };
        if let Some(words) = own(self) {
            return words;
        }
        match self {
            Hint::AnyOf(parts) => join(parts, ", or "),
            Hint::All(parts) => join(parts, "; "),
            leaf => leaf.words(),
        }
    }

    /// Adds a sentence that is not an action but belongs to the hint, such as a runtime's output.
    pub fn with_note(self, note: impl Into<String>) -> Self {
        let note = Hint::Text(note.into());
        match self {
            Hint::All(mut parts) => {
                parts.push(note);
                Hint::All(parts)
            }
            hint => Hint::All(vec![hint, note]),
        }
    }

    fn words(&self) -> String {
        match self {
            Hint::Text(text) => text.clone(),
            Hint::Install { runtime } => format!("install the {runtime} runtime"),
            Hint::UsePrecision(precisions) => {
                let names: Vec<&str> = precisions.iter().map(|p| p.name()).collect();
                format!("use the precision {}", names.join(" or "))
            }
            Hint::UseProvider(None) => "use another provider".into(),
            Hint::UseProvider(Some(id)) => format!("use the provider {id}"),
            Hint::UseDevice(ids) if ids.is_empty() => "use another device".into(),
            Hint::UseDevice(ids) => format!("use the device {}", ids.join(" or ")),
            Hint::GiveShape { input: None } => "give the shape of every input".into(),
            Hint::GiveShape { input: Some(input) } => format!("give the shape of the input `{input}`"),
            Hint::GiveModel => "give a path to an .onnx file or the name of a built-in model".into(),
            Hint::GiveWeights => "give weights: a checkpoint of this model".into(),
            Hint::Bake => "store the weights in the engine when it is built".into(),
            Hint::Rebuild => "build the engine again".into(),
            Hint::Isolate => "run the provider in a worker process".into(),
            Hint::LeaveOut { option } => format!("leave out `{option}`"),
            Hint::Lenient => "leave out what does not fit".into(),
            Hint::FreeMemory { bytes: None } => "free memory".into(),
            Hint::FreeMemory { bytes: Some(bytes) } => format!("free {bytes} bytes of memory"),
            Hint::Inspect => "look at what the file holds".into(),
            Hint::Build => "build the engine first".into(),
            Hint::ListProviders => "look at which providers were found, and why others are not used".into(),
            Hint::CheckInstallation => "check what each provider needs".into(),
            Hint::BindByValue => {
                "find the tensors by their values in the checkpoint that the model was exported from".into()
            }
            Hint::NamePart => "say which part of a pipeline the model is".into(),
            Hint::UseAsAdapter => "give it as an adapter".into(),
            Hint::AnyOf(_) | Hint::All(_) => String::new(),
        }
    }

    /// `kind` and the other fields of the JSON object; `None` for text, which is a JSON string.
    fn fields(&self) -> Option<(&'static str, Value)> {
        Some(match self {
            Hint::Text(_) => return None,
            Hint::Install { runtime } => ("install", json!({ "runtime": runtime })),
            Hint::UsePrecision(precisions) => ("use_precision", json!({ "precisions": precisions })),
            Hint::UseProvider(provider) => ("use_provider", json!({ "provider": provider })),
            Hint::UseDevice(devices) => ("use_device", json!({ "devices": devices })),
            Hint::GiveShape { input } => ("give_shape", json!({ "input": input })),
            Hint::GiveModel => ("give_model", json!({})),
            Hint::GiveWeights => ("give_weights", json!({})),
            Hint::Bake => ("bake", json!({})),
            Hint::Rebuild => ("rebuild", json!({})),
            Hint::Isolate => ("isolate", json!({})),
            Hint::LeaveOut { option } => ("leave_out", json!({ "option": option })),
            Hint::Lenient => ("lenient", json!({})),
            Hint::FreeMemory { bytes } => ("free_memory", json!({ "bytes": bytes })),
            Hint::Inspect => ("inspect", json!({})),
            Hint::Build => ("build", json!({})),
            Hint::ListProviders => ("list_providers", json!({})),
            Hint::CheckInstallation => ("check_installation", json!({})),
            Hint::BindByValue => ("bind_by_value", json!({})),
            Hint::NamePart => ("name_part", json!({})),
            Hint::UseAsAdapter => ("use_as_adapter", json!({})),
            Hint::AnyOf(parts) => ("any_of", json!({ "parts": parts })),
            Hint::All(parts) => ("all", json!({ "parts": parts })),
        })
    }

    /// Parses the hint from a JSON object; `None` if the kind or the fields are unknown.
    fn of_fields(value: &Value) -> Option<Self> {
        fn take<T: serde::de::DeserializeOwned>(value: &Value, field: &str) -> Option<T> {
            serde_json::from_value(value.get(field).cloned().unwrap_or(Value::Null)).ok()
        }
        Some(match value.get("kind")?.as_str()? {
            "install" => Hint::Install { runtime: take(value, "runtime")? },
            "use_precision" => Hint::UsePrecision(take(value, "precisions")?),
            "use_provider" => Hint::UseProvider(take(value, "provider")?),
            "use_device" => Hint::UseDevice(take(value, "devices")?),
            "give_shape" => Hint::GiveShape { input: take(value, "input")? },
            "give_model" => Hint::GiveModel,
            "give_weights" => Hint::GiveWeights,
            "bake" => Hint::Bake,
            "rebuild" => Hint::Rebuild,
            "isolate" => Hint::Isolate,
            "leave_out" => Hint::LeaveOut { option: take(value, "option")? },
            "lenient" => Hint::Lenient,
            "free_memory" => Hint::FreeMemory { bytes: take(value, "bytes")? },
            "inspect" => Hint::Inspect,
            "build" => Hint::Build,
            "list_providers" => Hint::ListProviders,
            "check_installation" => Hint::CheckInstallation,
            "bind_by_value" => Hint::BindByValue,
            "name_part" => Hint::NamePart,
            "use_as_adapter" => Hint::UseAsAdapter,
            "any_of" => Hint::AnyOf(take(value, "parts")?),
            "all" => Hint::All(take(value, "parts")?),
            _ => return None,
        })
    }

    /// Encodes the hint for the text field of a C struct: text unchanged, everything else as a JSON object.
    pub(crate) fn to_wire(&self) -> String {
        match self {
            Hint::Text(text) => text.clone(),
            hint => serde_json::to_string(hint).unwrap_or_else(|_| hint.to_string()),
        }
    }

    /// The inverse of [`to_wire`](Hint::to_wire). Text that only resembles JSON stays text.
    pub(crate) fn of_wire(text: String) -> Self {
        if text.starts_with('{')
            && let Ok(hint) = serde_json::from_str(&text)
        {
            return hint;
        }
        Hint::Text(text)
    }
}

impl fmt::Display for Hint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(&|_| None))
    }
}

impl From<&str> for Hint {
    fn from(text: &str) -> Self {
        Hint::Text(text.into())
    }
}

impl From<String> for Hint {
    fn from(text: String) -> Self {
        Hint::Text(text)
    }
}

impl From<&String> for Hint {
    fn from(text: &String) -> Self {
        Hint::Text(text.clone())
    }
}

impl Serialize for Hint {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.fields() {
            None => serializer.serialize_str(&self.to_string()),
            Some((kind, mut object)) => {
                object["kind"] = kind.into();
                object["text"] = self.to_string().into();
                object.serialize(serializer)
            }
        }
    }
}

impl<'de> Deserialize<'de> for Hint {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        Ok(match &value {
            Value::String(text) => Hint::Text(text.clone()),
            value => {
                Hint::of_fields(value).unwrap_or_else(|| match value.get("text").and_then(Value::as_str) {
                    Some(text) => Hint::Text(text.into()),
                    None => Hint::Text(value.to_string()),
                })
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn every_kind() -> Vec<Hint> {
        let leaves = vec![
            Hint::Text("look elsewhere".into()),
            Hint::Install { runtime: "thing".into() },
            Hint::UsePrecision(vec![Precision::Fp32, Precision::Bf16]),
            Hint::UseProvider(None),
            Hint::UseProvider(Some("other".into())),
            Hint::UseDevice(vec![]),
            Hint::UseDevice(vec!["cpu".into()]),
            Hint::GiveShape { input: None },
            Hint::GiveShape { input: Some("x".into()) },
            Hint::GiveModel,
            Hint::GiveWeights,
            Hint::Bake,
            Hint::Rebuild,
            Hint::Isolate,
            Hint::LeaveOut { option: "bake".into() },
            Hint::Inspect,
            Hint::Build,
            Hint::ListProviders,
            Hint::CheckInstallation,
            Hint::BindByValue,
            Hint::NamePart,
            Hint::UseAsAdapter,
            Hint::FreeMemory { bytes: Some(7) },
            Hint::FreeMemory { bytes: None },
        ];
        let both =
            [Hint::AnyOf(leaves.clone()), Hint::All(vec![Hint::AnyOf(leaves[..2].to_vec()), Hint::Bake])];
        leaves.into_iter().chain(both).collect()
    }

    #[test]
    fn every_kind_survives_json_and_the_text_field() {
        for hint in every_kind() {
            let json = serde_json::to_string(&hint).unwrap();
            assert_eq!(serde_json::from_str::<Hint>(&json).unwrap(), hint, "{json}");
            assert_eq!(Hint::of_wire(hint.to_wire()), hint);
            assert!(!hint.to_string().is_empty() && !hint.to_string().contains("--"), "{hint}");
        }
    }

    #[test]
    fn an_unknown_kind_becomes_its_text() {
        for (json, text) in [
            (
                r#"{"kind":"use_quantum","qubits":7,"text":"use a quantum computer"}"#,
                "use a quantum computer",
            ),
            // A known kind with changed fields.
            (
                r#"{"kind":"use_precision","precisions":["fp3"],"text":"use the precision fp3"}"#,
                "use the precision fp3",
            ),
            (r#"{"kind":"odd"}"#, r#"{"kind":"odd"}"#),
            (r#""words""#, "words"),
        ] {
            assert_eq!(serde_json::from_str::<Hint>(json).unwrap(), Hint::Text(text.into()));
        }
        assert_eq!(Hint::of_wire("{not JSON".into()), Hint::Text("{not JSON".into()));
        let inside =
            r#"{"kind":"any_of","parts":[{"kind":"odd","text":"be lucky"},{"kind":"bake"}],"text":"x"}"#;
        assert_eq!(
            serde_json::from_str::<Hint>(inside).unwrap(),
            Hint::AnyOf(vec!["be lucky".into(), Hint::Bake])
        );
    }

    #[test]
    fn a_program_replaces_the_wording_of_nested_hints() {
        let own = |hint: &Hint| matches!(hint, Hint::Bake).then(|| "press Bake".to_string());
        let hint = Hint::AnyOf(vec![Hint::Bake, Hint::LeaveOut { option: "threads".into() }]);
        assert_eq!(hint.render(&own), "press Bake, or leave out `threads`");
        assert_eq!(
            hint.with_note("it said: no").render(&own),
            "press Bake, or leave out `threads`; it said: no"
        );
    }
}

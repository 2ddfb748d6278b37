//! PEFT's configuration of an adapter: `adapter_config.json`, or its copy in the `lora_adapter_metadata` of a file that
//! diffusers wrote. This code follows `LoraConfig`, `LoHaConfig` and `LoKrConfig` of PEFT 0.21.

use super::key::Path;
use regex::Regex;
use sdrun_abi::{Error, Result};
use serde_json::{Map, Value};

/// A kind of adapter that PEFT writes and sdrun applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Type {
    Lora,
    Loha,
    Lokr,
}

/// The arithmetic that a configuration states. `fan_in_fan_out` is ignored, as PEFT does for linear layers and convolutions
/// of diffusion models. `bias` and `modules_to_save` show in the file's tensors.
#[derive(Clone, Debug)]
pub(super) struct Config {
    kind: Type,
    alpha: f64,
    rank: Option<f64>,
    /// In the file's order, which PEFT and diffusers sort by name.
    alphas: Vec<(Regex, f64)>,
    ranks: Vec<(Regex, f64)>,
    rank_stabilized: bool,
    dora: bool,
}

/// Options that change an adapter's arithmetic and are not supported.
const REFUSED: [&str; 8] = [
    "use_qalora",
    "use_bdlora",
    "layer_replication",
    "alora_invocation_tokens",
    "trainable_token_indices",
    "target_parameters",
    "arrow_config",
    "kasa_config",
];
/// Initialisations that subtract the adapter's first values from the model's weights, so that the adapter does not fit the
/// original model.
const CHANGING: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];

impl Config {
    /// Reads the fields whose names begin with `prefix`. Messages name their place by `of`.
    ///
    /// `Unimplemented` for kinds of adapters and options that cannot be applied; `InvalidArgument` for invalid values.
    pub(super) fn new(fields: &Map<String, Value>, prefix: &str, of: &str) -> Result<Self> {
        let field = |name: &str| fields.get(&format!("{prefix}{name}")).filter(|value| !value.is_null());
        let invalid = |name: &str, value: &Value| Error::invalid(format!("{of}: {name} cannot be {value}"));
        let number = |name: &str, default: f64| match field(name) {
            None => Ok(default),
            Some(value) => value.as_f64().ok_or_else(|| invalid(name, value)),
        };
        let kind = match field("peft_type").and_then(Value::as_str).unwrap_or("LORA") {
            "LORA" => Type::Lora,
            "LOHA" => Type::Loha,
            "LOKR" => Type::Lokr,
            other => {
                let message = format!("{of}: adapters of PEFT's type {other} cannot be applied");
                return Err(Error::unsupported(message).with_hint("LORA, LOHA and LOKR can"));
            }
        };
        let is_set = |value: &Value| match value {
            Value::Bool(set) => *set,
            Value::Array(list) => !list.is_empty(),
            Value::Object(object) => !object.is_empty(),
            _ => true,
        };
        let unsupported = |what: String| {
            Err(Error::unsupported(format!("{of}: adapters with {what} cannot be applied"))
                .with_hint("merge it with the program that made it"))
        };
        if let Some(name) = REFUSED.iter().find(|name| field(name).is_some_and(is_set)) {
            return unsupported((*name).into());
        }
        let init = field("init_lora_weights").and_then(Value::as_str).unwrap_or_default().to_lowercase();
        if CHANGING.iter().any(|name| init.starts_with(name)) {
            return unsupported(format!("init_lora_weights={init} (they belong to changed base weights)"));
        }
        let patterns = |name: &str| {
            let Some(value) = field(name) else { return Ok(Vec::new()) };
            let entries = value.as_object().ok_or_else(|| invalid(name, value))?;
            entries
                .iter()
                .map(|(pattern, number)| {
                    let number = number.as_f64().ok_or_else(|| invalid(name, number))?;
                    // PEFT: re.match(rf"(.*\.)?({pattern})$", path)
                    let regex = Regex::new(&format!(r"^(?:.*\.)?(?:{pattern})$"))
                        .map_err(|error| Error::invalid(format!("{of}: {name} has {pattern:?}: {error}")))?;
                    Ok((regex, number))
                })
                .collect::<Result<Vec<_>>>()
        };
        let alpha = if kind == Type::Lora { "lora_alpha" } else { "alpha" };
        let rank = field("r").map(|value| match value.as_u64() {
            Some(rank) if rank > 0 => Ok(rank as f64),
            _ => Err(invalid("r", value)),
        });
        Ok(Config {
            kind,
            alpha: number(alpha, 8.0)?,
            rank: rank.transpose()?,
            alphas: patterns("alpha_pattern")?,
            ranks: patterns("rank_pattern")?,
            rank_stabilized: field("use_rslora").is_some_and(is_set),
            dora: field("use_dora").is_some_and(is_set),
        })
    }

    /// The scale of a module's change, given the rank of its factors. `Err` says why they do not fit.
    pub(super) fn scale(&self, path: &Path, rank: Option<usize>) -> Result<f64, String> {
        let find = |patterns: &[(Regex, f64)]| {
            patterns.iter().find(|(pattern, _)| pattern.is_match(path.as_str())).map(|(_, number)| *number)
        };
        let alpha = find(&self.alphas).unwrap_or(self.alpha);
        let rank = rank.map(|rank| rank as f64);
        let configured = find(&self.ranks).or(self.rank).or(rank).unwrap_or(1.0);
        match rank {
            // PEFT divides the alpha of LoKr by the configured rank even if its factors have none.
            Some(rank) if self.kind != Type::Lokr && rank != configured => {
                Err(format!("factors of rank {rank}, while the adapter's configuration says {configured}"))
            }
            _ => Ok(alpha / if self.rank_stabilized { configured.sqrt() } else { configured }),
        }
    }

    /// Whether every module has magnitudes.
    pub(super) fn is_dora(&self) -> bool {
        self.dora
    }
}

//! Facts from an adapter's `__metadata__` and PEFT's `adapter_config.json` that shapes do not show.

use super::{key::Place, peft::Config};
use sdrun_abi::{Error, Result};
use sdrun_files::{Links, read_small};
use serde_json::{Map, Value};
use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

/// PEFT's name for its configuration.
const CONFIG: &str = "adapter_config.json";
/// Files in a folder that PEFT and diffusers save adapters to.
const FILES: [&str; 2] = ["adapter_model.safetensors", "pytorch_lora_weights.safetensors"];
/// Largest size of a configuration in bytes.
const MOST: u64 = 1 << 20;

/// Hints for the arithmetic.
#[derive(Clone, Debug, Default)]
pub(super) struct Hints {
    /// LyCORIS' `rs_lora`, for the whole file.
    rank_stabilized: bool,
    /// PEFT's configurations by component, as diffusers stores them (`unet`, `transformer`, `text_encoder`, …). That of
    /// `adapter_config.json` has no name and serves all others.
    peft: BTreeMap<String, Config>,
}

/// Finds the adapter file of a folder, and PEFT's configuration of a file or folder if there is one.
///
/// A configuration beside a file belongs to it if PEFT named the file, or if there is no other safetensors file.
pub(super) fn locate(path: &Path) -> Result<(PathBuf, Option<PathBuf>)> {
    let (folder, file) = if path.is_dir() {
        let file = FILES.iter().map(|name| path.join(name)).find(|file| file.exists());
        let file = file.ok_or_else(|| {
            let message = format!("{} has neither {} nor {}", path.display(), FILES[0], FILES[1]);
            Error::not_found(message).with_file(path)
        })?;
        (path.to_owned(), file)
    } else {
        (path.parent().map(Path::to_owned).unwrap_or_default(), path.to_owned())
    };
    let config = folder.join(CONFIG);
    let is_own = config.is_file() && (file.ends_with(FILES[0]) || is_alone(&folder)?);
    Ok((file, is_own.then_some(config)))
}

fn is_alone(folder: &Path) -> Result<bool> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let entries = fs::read_dir(folder).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    let entries = entries.map_err(|error| Error::io("list", folder, &error))?;
    let is_adapter = |entry: &&fs::DirEntry| entry.path().extension().is_some_and(|e| e == "safetensors");
    Ok(entries.iter().filter(is_adapter).count() == 1)
}

fn read(config: &Path) -> Result<Map<String, Value>> {
    let text = read_small(config, Links::Follow, MOST)?;
    serde_json::from_slice(&text).map_err(|error| {
        Error::invalid(format!("{} is no JSON object: {error}", config.display())).with_file(config)
    })
}

impl Hints {
    /// Reads the metadata of a file and the configuration that belongs to it.
    pub(super) fn new(metadata: &BTreeMap<String, String>, config: Option<&Path>) -> Result<Self> {
        let arguments = metadata.get("ss_network_args").and_then(|text| serde_json::from_str(text).ok());
        let arguments: Map<String, Value> = arguments.unwrap_or_default();
        let mut peft = BTreeMap::new();
        if let Some(text) = metadata.get("lora_adapter_metadata") {
            let fields: Map<String, Value> = serde_json::from_str(text).map_err(|error| {
                Error::invalid(format!("lora_adapter_metadata is no JSON object: {error}"))
            })?;
            let components =
                fields.keys().filter_map(|key| key.split_once('.')).map(|(component, _)| component);
            for component in components {
                if !peft.contains_key(component) {
                    let config = Config::new(&fields, &format!("{component}."), "lora_adapter_metadata")?;
                    peft.insert(component.to_owned(), config);
                }
            }
        }
        if let Some(config) = config {
            let own = Config::new(&read(config)?, "", CONFIG).map_err(|error| error.with_file(config))?;
            peft.insert(String::new(), own);
        }
        Ok(Hints { rank_stabilized: arguments.get("rs_lora").is_some_and(is_true), peft })
    }

    /// PEFT's configuration for the modules of a place.
    pub(super) fn peft(&self, place: Place) -> Option<&Config> {
        let components: &[&str] = match place {
            Place::Denoiser => &["unet", "transformer", ""],
            Place::TextEncoder(1) => &["text_encoder", ""],
            Place::TextEncoder(2) => &["text_encoder_2", ""],
            Place::TextEncoder(_) => &["text_encoder_3", ""],
            Place::T5 | Place::Unsaid => &[""],
        };
        components.iter().find_map(|component| self.peft.get(*component))
    }

    /// Whether LyCORIS divides alpha by the root of the rank.
    pub(super) fn is_rank_stabilized(&self) -> bool {
        self.rank_stabilized
    }
}

/// Trainers write Python's `str(True)`, JSON's `true` and strings of either.
fn is_true(value: &Value) -> bool {
    value.as_bool().unwrap_or_else(|| value.as_str().is_some_and(|s| s.eq_ignore_ascii_case("true")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter::key::Path;

    fn hints(key: &str, text: &str) -> Result<Hints> {
        Hints::new(&BTreeMap::from([(key.into(), text.into())]), None)
    }

    #[test]
    fn both_trainers_say_their_scaling() {
        let path = |path: &str| Path::Dotted(path.into());
        for (text, expected) in [
            (r#"{"algo":"lora","rs_lora":"True"}"#, true),
            (r#"{"rs_lora":true}"#, true),
            (r#"{"rs_lora":"False"}"#, false),
            ("{}", false),
            ("broken", false),
        ] {
            assert_eq!(hints("ss_network_args", text).unwrap().is_rank_stabilized(), expected, "{text}");
        }
        let peft = hints(
            "lora_adapter_metadata",
            r#"{"unet.lora_alpha":8,"unet.r":4,"unet.use_rslora":true,"unet.alpha_pattern":{"a.to_q":2,"q":3},
                "text_encoder.lora_alpha":1.5,"text_encoder.r":3}"#,
        )
        .unwrap();
        let scale = |place, name, rank| peft.peft(place).unwrap().scale(&path(name), Some(rank));
        assert_eq!(scale(Place::Denoiser, "x.a.to_q", 4), Ok(1.0));
        assert_eq!(scale(Place::Denoiser, "x.b.to_q", 4), Ok(4.0));
        assert_eq!(scale(Place::TextEncoder(1), "x", 3), Ok(0.5));
        assert!(scale(Place::TextEncoder(1), "x", 2).unwrap_err().contains("rank 2"));
        assert!(peft.peft(Place::TextEncoder(2)).is_none());
    }

    #[test]
    fn what_cannot_be_applied_is_refused_by_name() {
        for (text, words) in [
            (r#"{"unet.peft_type":"OFT"}"#, "type OFT"),
            (r#"{"unet.use_qalora":true}"#, "use_qalora"),
            (r#"{"unet.init_lora_weights":"pissa_niter_16"}"#, "pissa_niter_16"),
            (r#"{"unet.lora_alpha":"many"}"#, "lora_alpha cannot be \"many\""),
            (r#"{"unet.r":0}"#, "r cannot be 0"),
            (r#"{"unet.rank_pattern":{"(":3}}"#, "rank_pattern has \"(\""),
            ("broken", "no JSON object"),
        ] {
            let error = hints("lora_adapter_metadata", text).unwrap_err();
            assert!(error.message.contains(words), "{error}");
        }
        let harmless = r#"{"unet.peft_type":"LORA","unet.init_lora_weights":"gaussian","unet.layer_replication":null,
            "unet.use_qalora":false,"unet.arrow_config":null,"unet.trainable_token_indices":[]}"#;
        hints("lora_adapter_metadata", harmless).unwrap();
    }
}

//! Determines the component of an exported model from its folder.

use crate::Component;
use sdrun_files::{Links, read_small};
use serde_json::Value;
use std::path::Path;

/// Larger than any `config.json` or `model_index.json`.
const MAX_JSON: u64 = 1 << 20;

/// The component of a model file, from the folder of its export: `text_encoder/model.onnx` in a pipeline whose
/// `model_index.json` lists `text_encoder`, or a file beside the `config.json` of a class that exists for one component only.
/// `None` if neither shows it; a name alone proves nothing.
pub(super) fn component(model: &Path) -> Option<Component> {
    let folder = model.parent()?;
    let of_pipeline = || {
        let name = folder.file_name()?.to_str()?;
        let component = Component::of_folder(name)?;
        let index = json(&folder.parent()?.join("model_index.json"))?;
        let listed = |name: &str| index.get(name).is_some_and(Value::is_array);
        // The index names the parts of the original pipeline, for example `vae` for `vae_decoder`.
        let known = Component::FOLDERS.iter().any(|(name, other)| *other == component && listed(name));
        known.then_some(component)
    };
    let of_class = || {
        let config = json(&folder.join("config.json"))?;
        let diffusers = config.get("_class_name").and_then(Value::as_str);
        let transformers = config.get("architectures").and_then(|classes| classes.get(0)?.as_str());
        match diffusers.or(transformers)? {
            "UNet2DConditionModel" => Some(Component::Denoiser),
            class if class.ends_with("Transformer2DModel") => Some(Component::Denoiser),
            class if class.starts_with("AutoencoderKL") => Some(Component::Vae),
            "ControlNetModel" => Some(Component::ControlNet),
            "CLIPTextModel" => Some(Component::TextEncoder),
            // CLIP with projection is the first encoder of SD 3 and the second of SDXL, T5 the second of Flux and the third
            // of SD 3.
            _ => None,
        }
    };
    of_pipeline().or_else(of_class)
}

/// A small JSON file; `None` if it is missing, larger, or something else.
fn json(path: &Path) -> Option<Value> {
    serde_json::from_slice(&read_small(path, Links::Refuse, MAX_JSON).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_folder_of_an_export_tells_the_component() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, text).unwrap();
            path
        };
        let of = |name: &str| component(&dir.path().join(name));
        assert_eq!(of("text_encoder/model.onnx"), None, "a folder's name alone proves nothing");
        write(
            "model_index.json",
            r#"{"text_encoder_3": ["transformers", "T5EncoderModel"], "vae": ["a", "b"], "unet": 1}"#,
        );
        assert_eq!(of("text_encoder_3/model.onnx"), Some(Component::TextEncoder3));
        assert_eq!(of("vae_decoder/model.onnx"), Some(Component::Vae));
        assert_eq!(of("unet/model.onnx"), None, "the pipeline has no such part");
        for (class, expected) in [
            (r#"{"architectures": ["CLIPTextModel"]}"#, Some(Component::TextEncoder)),
            (r#"{"architectures": ["CLIPTextModelWithProjection"]}"#, None),
            (r#"{"_class_name": "SD3Transformer2DModel"}"#, Some(Component::Denoiser)),
            (r#"{"_class_name": "AutoencoderKL"}"#, Some(Component::Vae)),
            ("[", None),
            (r#"{"architectures": []}"#, None),
        ] {
            write("alone/config.json", class);
            assert_eq!(of("alone/model.onnx"), expected, "{class}");
        }
        write("alone/config.json", &" ".repeat(2 << 20));
        assert_eq!(of("alone/model.onnx"), None);
    }
}

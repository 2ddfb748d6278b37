"""Exports the small denoisers of small.py, T5 with a mask and the networks of Sana for tests/tiny.

    python3 tools/diffusion/denoisers.py FOLDER

FOLDER is a copy of the small pipelines (`sdrun_tiny::folder()`). The script adds `FAMILY/onnx/NAME/{model.onnx,map.json}`, and
tools/export/pack_tiny.py packs the whole."""

import dataclasses
import json
import pathlib
import sys
import tempfile

import onnx
import small

import architectures  # noqa: E402, from tools/export
import export  # noqa: E402


def config(module):
    return {name: value for name, value in module.config.items() if not name.startswith("_")}


def architecture(place, module):
    """The module as export.py takes it."""
    tag, made = f"tiny-{place.replace('/', '-')}/A", config(module)
    name = type(module).__name__
    if name == "UNet2DConditionModel":
        architectures.unet(place, place, tag, made, pooled=32 if made["addition_embed_type"] else None)
    elif name == "SD3Transformer2DModel":
        architectures.transformer(place, place, tag, name, made, made["joint_attention_dim"], made["pooled_projection_dim"])
    elif name == "SanaTransformer2DModel":
        architectures.transformer(place, place, tag, name, made, made["caption_channels"])
    elif name == "PixArtTransformer2DModel":
        constant = {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
        architectures.transformer(place, place, tag, name, made, made["caption_channels"], constant=constant)
    else:
        pooled = made.get("pooled_projection_dim")
        architectures.token_transformer(place, place, tag, name, made, pooled, bool(made.get("guidance_embeds")))
        text = architectures.ARCHITECTURES[place].inputs["encoder_hidden_states"]
        text.dims = (*text.dims[:2], made["joint_attention_dim"])
    return dataclasses.replace(architectures.ARCHITECTURES[place], dtype="float32")


def write(arch, folder):
    """The graph with its weights, and the table that pack_tiny.py reads."""
    model, weight_map = export.export(arch, "weights")
    assert export.check(arch, model, weight_map, False), f"{arch.file} differs from PyTorch"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        place = pathlib.Path(place)
        (place / "model.onnx").write_bytes(model.SerializeToString())
        export.write_weights(weight_map, place / weight_map["weights_file"])
        onnx.save(onnx.load(place / "model.onnx"), folder / "model.onnx")
    (folder / "map.json").write_text(json.dumps(weight_map))


def main(folder):
    folder = pathlib.Path(folder)
    values = export.values

    def smaller(tag, name, spec, *more):
        """Values for tracing and checking; the vocabulary is small too."""
        found = values(tag, name, spec, *more)
        return found % 1000 if spec.kind == "ids" else found

    export.values = smaller
    for place, build in small.DENOISERS.items():
        family, name = place.split("/")
        write(architecture(place, build()), folder / family / "onnx" / name)
    t5 = small.t5(32).to_dict()
    architectures.text_encoder(
        "t5", "t5", "tiny-flux-text_encoder_2/A", t5, "float32", "T5EncoderModel", ("last_hidden_state",), masked=True
    )
    write(architectures.ARCHITECTURES["t5"], folder / "flux/onnx/text_encoder_masked")
    sana(folder / "sana/onnx")


def sana(folder):
    """Its networks, which no other small pipeline has."""
    place = "sana/transformer"
    write(architecture(place, small.sana_transformer()), folder / "transformer")
    # Without folding of constants, which would change the scales of norms.
    architectures.language_model("gemma", "gemma", "tiny-sana-text_encoder/A", small.gemma().to_dict(), "float32", reduced={})
    write(architectures.ARCHITECTURES["gemma"], folder / "text_encoder")
    architectures.autoencoder("vae_", "vae", "tiny-sana-vae/A", config(small.dc_ae()), 32, "AutoencoderDC")
    for half in ("vae_encoder", "vae_decoder"):
        write(architectures.ARCHITECTURES[half], folder / half)


if __name__ == "__main__":
    main(*sys.argv[1:])

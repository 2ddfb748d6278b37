#!/usr/bin/env python3
"""Packs a folder of small pipelines into tests/tiny/data, without the tensors that the weight rule of core/weights/models/README.md makes.

    python3 tools/export/pack_tiny.py FOLDER tests/tiny/data

FOLDER has, for each family, `onnx/COMPONENT/{model.onnx,map.json}`, `single_file/`, `lora/`, `oracle/`, and folders in the layout of
diffusers. Every tensor that a map names is looked for in every file of its family, with weights A and B, as it is, transposed and in
halves, in f32 and f16, and cut out. `data/index.json.xz` lists the cuts, and the SHA-256 sum of each whole file.
"""
import hashlib
import json
import lzma
import pathlib
import sys

import numpy as np

import synth

# Files that no test reads.
LEFT_OUT = ("tokenizer", "special_tokens", "vocab.json", "merges.txt", "pipeline_", "key_table", "oracle/unet_controlnet")


def candidates(family):
    """(tag, name, shape, dtype, part) -> bytes, longest first; part: all, transposed, first or second half of the rows."""
    found = {}
    for path in sorted(p for p in family.glob("onnx/*/*") if p.name in ("map.json", "model.map.json")):
        component = json.loads(path.read_text())
        for tensor in component["tensors"]:
            for letter in "AB":
                tag = component["tag"].rsplit("/", 1)[0] + "/" + letter
                name, shape = tensor["src"], tensor["src_shape"]
                value = synth.weight(tag, name, shape)
                # Weights B are the rule's rounded to f16, in whichever type a file has them.
                for dtype, array in (("F32", value), ("F16", value.astype(np.float16))):
                    rows = len(array) // 2 if shape else 0
                    parts = {"all": array, "first": array[:rows], "second": array[rows:]} if rows else {"all": array}
                    if len(shape) == 2:
                        parts["transposed"] = array.T
                    for part, data in parts.items():
                        found[tag, name, tuple(shape), dtype, part] = np.ascontiguousarray(data).tobytes()
    return sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))


def holes(data, known):
    """[offset, tag, name, shape, dtype, part] in order of offsets."""
    found, taken = [], np.zeros(len(data), bool)
    for what, value in known:
        at = data.find(value) if len(value) >= 32 else -1
        while at >= 0:
            if not taken[at : at + len(value)].any():
                taken[at : at + len(value)] = True
                found.append((at, *what))
            at = data.find(value, at + len(value))
    return sorted(found), taken


def main(source, target):
    files = {}
    for family in sorted(p for p in source.iterdir() if p.is_dir()):
        known = candidates(family)
        for path in sorted(p for p in family.rglob("*") if p.is_file()):
            relative = path.relative_to(source).as_posix()
            if any(word in relative for word in LEFT_OUT) or ("/onnx/" in relative and "config" in path.name):
                continue
            if "/onnx/" in relative and path.name == "model_index.json":
                continue
            data = path.read_bytes()
            cut, taken = holes(data, known)
            rest = np.frombuffer(data, np.uint8)[~taken].tobytes()
            packed = lzma.compress(rest, preset=9 | lzma.PRESET_EXTREME)
            out = target / (relative + ".xz")
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_bytes(packed)
            files[relative] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), "holes": cut}
            print(f"{relative}: {len(data)} bytes, {len(cut)} tensors cut out, {len(rest)} left, {len(packed)} packed")
    index = json.dumps(files, separators=(",", ":")).encode()
    (target / "index.json.xz").write_bytes(lzma.compress(index, preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))

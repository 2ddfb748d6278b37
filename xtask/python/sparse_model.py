"""Unpacks a built-in model's graph and creates a sparse weight file of the right size, which takes no space on disk.

Usage: python sparse_model.py GRAPH.onnx.xz MAP.json.xz FOLDER
"""

import json
import lzma
import pathlib
import sys


def main(graph, weight_map, folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.onnx").write_bytes(lzma.open(graph).read())
    described = json.load(lzma.open(weight_map))
    with open(folder / described["weights_file"], "wb") as weights:
        weights.truncate(described["weights_bytes"])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]))

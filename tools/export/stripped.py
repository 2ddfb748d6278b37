"""What every exporter here writes: NAME.graph.onnx.xz, a graph whose weights are external data in a file that is not
kept, and NAME.map.json.xz, which says how to make that file. The format is described in core/weights/models/README.md."""

import json
import lzma
import pathlib

import numpy as np
import onnx
from onnx import TensorProto, helper

import synth

ALIGNMENT = 64
# A reader keeps the dictionary in memory; no graph is much larger than this one.
XZ = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 4 << 20}


def externalise(tensor, location, offset):
    """Takes the values out of `tensor` and points it to `location`; returns their length in bytes."""
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    length = int(np.prod(tensor.dims, dtype=np.int64)) * dtype.itemsize
    for field in ("raw_data", "float_data", "int32_data", "double_data"):
        tensor.ClearField(field)
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, str(value)
    return length


def strip(model, name, tag, gains):
    """Strips the initializers named in `gains` out of `model`, in place; returns the map. `gains` holds a factor for each."""
    location = f"{name}.weights"
    offset, tensors = 0, []
    for tensor in model.graph.initializer:
        if tensor.name not in gains:
            continue
        offset = -(-offset // ALIGNMENT) * ALIGNMENT
        length = externalise(tensor, location, offset)
        shape = list(tensor.dims)
        entry = {
            "init": tensor.name,
            "src": tensor.name,
            "op": "identity",
            "src_shape": shape,
            "shape": shape,
            "dtype": helper.tensor_dtype_to_np_dtype(tensor.data_type).name,
            "offset": offset,
            "length": length,
        }
        if gains[tensor.name] != 1.0:
            entry["gain"] = gains[tensor.name]
        tensors.append(entry)
        offset += length
    graph = f"{name}.graph.onnx"
    return {"graph": graph, "weights_file": location, "weights_bytes": offset, "tag": tag, "tensors": tensors}


def write(model, weight_map, folder):
    """Writes both files, the same bytes every time."""
    folder = pathlib.Path(folder)
    map_name = weight_map["graph"].replace(".graph.onnx", ".map.json")
    for name, data in (
        (weight_map["graph"], model.SerializeToString(deterministic=True)),
        (map_name, json.dumps(weight_map, indent=0).encode()),
    ):
        (folder / f"{name}.xz").write_bytes(lzma.compress(data, check=lzma.CHECK_CRC32, filters=[XZ]))


def filled(model, weight_map, tag=None):
    """A copy of a stripped model with its weights inline, as bytes, for a runtime to check it."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    initializers = {tensor.name: tensor for tensor in copy.graph.initializer}
    for entry in weight_map["tensors"]:
        values = synth.weight(tag or weight_map["tag"], entry["src"], entry["src_shape"], entry.get("gain", 1.0))
        if entry["op"] == "transpose":
            values = values.T
        tensor = initializers[entry["init"]]
        del tensor.external_data[:]
        tensor.ClearField("data_location")
        tensor.raw_data = np.ascontiguousarray(values).astype(entry["dtype"]).tobytes()
    return copy.SerializeToString()

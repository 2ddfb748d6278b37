"""Writes the ONNX backend node tests of the installed `onnx` package into a folder.

Usage: python node_tests.py FOLDER

For every test: FOLDER/NAME/model.onnx and FOLDER/NAME/test_data_set_N/{input,output}_M.pb, the layout of
onnx's own `backend-test-tools generate-data` (which writes the model tests only).
"""

import pathlib
import sys

import numpy
import onnx.backend.test.case.node
from onnx import TensorProto, numpy_helper


def message(value, info):
    """Returns the protobuf message for `value`, an input or output described by `info`."""
    if isinstance(value, TensorProto):
        return value
    kind = info.type.WhichOneof("value")
    if kind == "map_type":
        return numpy_helper.from_dict(value, info.name)
    if kind == "sequence_type":
        return numpy_helper.from_list(value, info.name)
    if kind == "optional_type":
        return numpy_helper.from_optional(value, info.name)
    return numpy_helper.from_array(numpy.asarray(value), info.name)


def main(folder):
    for case in onnx.backend.test.case.node.collect_testcases():
        for number, (inputs, outputs) in enumerate(case.data_sets):
            data = folder / case.name / f"test_data_set_{number}"
            data.mkdir(parents=True)
            graph = case.model.graph
            for side, values, infos in (("input", inputs, graph.input), ("output", outputs, graph.output)):
                for index, (value, info) in enumerate(zip(values, infos)):
                    path = data / f"{side}_{index}.pb"
                    path.write_bytes(message(value, info).SerializeToString())
        (folder / case.name / "model.onnx").write_bytes(case.model.SerializeToString())


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))

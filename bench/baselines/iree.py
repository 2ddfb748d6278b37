"""IREE on the CPU: the ONNX file imported, compiled for this processor with LLVM and run by the local task system."""

import math
import os
import subprocess
import sys
import tempfile

import common

TARGET = [
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
    "--iree-opt-level=O3",
    # Else it refuses the UNet of Stable Diffusion 1.5, one of whose kernels needs 50 KB of stack.
    "--iree-llvmcpu-fail-on-out-of-bounds-stack-allocation=false",
]


def open_model(request):
    if request.low:
        # Its demotion of contractions to bfloat16 leaves imported models as they are.
        raise common.Unsupported(
            "IREE's --iree-input-demote-f32-to-f16 gives an imported ONNX model that fails: buffer view byte length exceeds backing buffer"
        )
    from iree import runtime

    # The weights live in a file of IREE's own; it stays until the adapter ends.
    folder = open_model.folder = tempfile.TemporaryDirectory()
    imported, weights, program = (os.path.join(folder.name, name) for name in ("model.mlir", "model.irpa", "model.vmfb"))
    clock = common.Clock()
    tool("iree-import-onnx", request.model, "-o", imported, "--externalize-params", "--save-params-to", weights, *large(request.model))
    tool("iree-compile", imported, "-o", program, *TARGET)
    built = clock.lap()

    runtime.flags.parse_flags(f"--task_topology_group_count={request.threads}")
    config = runtime.Config("local-task")
    index = runtime.ParameterIndex()
    index.load(weights)
    parameters = runtime.create_io_parameters_module(config.vm_instance, index.create_provider(scope="model"))
    module = runtime.VmModule.mmap(config.vm_instance, program)
    context = runtime.SystemContext(vm_modules=[parameters, config.default_vm_modules[0], module], config=config)
    main = next(name for name in module.function_names if not name.startswith("__") and not name.endswith("$async"))
    function = context.modules[module.name][main]
    names, outputs = request.names()
    arrays = request.inputs()
    inputs = [runtime.asdevicearray(config.device, arrays[name]) for name in names]

    def run():
        results = function(*inputs)
        return results if isinstance(results, (tuple, list)) else (results,)

    return common.Peer(
        system="IREE",
        version=common.version("iree-base-runtime"),
        precision="fp32",
        settings=f"llvm-cpu for this processor, O3, local-task, {request.threads} threads",
        build_seconds=built,
        load_seconds=clock.lap(),
        run=run,
        arrays=lambda results: {name: result.to_host() for name, result in zip(outputs, results)},
    )


def large(path):
    """Options for a model of more than 2 GB, which the importer otherwise tries to fit into one message."""
    import onnx

    tensors = [t for t in onnx.load(path, load_external_data=False).graph.initializer if t.external_data]
    if sum(int(entry.value) for t in tensors for entry in t.external_data if entry.key == "length") < 2**31:
        return []
    # This way it does not read external weights when it imports, so even the smallest has to stay outside.
    smallest = min(math.prod(t.dims) for t in tensors)
    return ["--large-model", "--num-elements-threshold", str(min(100, smallest))]


def tool(name, *arguments):
    """Runs one of IREE's commands, which stand beside the Python that runs this."""
    path = os.path.join(os.path.dirname(sys.executable), name)
    done = subprocess.run([path, *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error:" in line] or done.stderr.splitlines()[-1:]
        raise common.Unsupported(f"{name} failed: {lines[0] if lines else f'exit status {done.returncode}'}")


common.main(open_model)

"""Exports a trained model to a file: safetensors, or ONNX checked against onnxruntime.

It exports the weights that evaluation uses: the averaged ones, if the run keeps them.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from pathlib import Path

import torch

from lockstep.errors import BadInput, LockstepError, unknown
from lockstep.kernels.structure import leaves
from lockstep.runs.checkpoint import sync_folder, write_durably
from lockstep.runs.tensor_file import TensorEntry, TensorWriter, begin_tensors
from lockstep.runs.trained_run import Trained
from lockstep.spec.system import extra_command

SUFFIXES = {"safetensors": ".safetensors", "onnx": ".onnx"}
_TOLERANCE = 1e-4


def export_model(trained: Trained, path: Path, format: str) -> float | None:
    """Write a format of `SUFFIXES`, never over a file; for ONNX returns the largest difference to torch."""
    if format not in SUFFIXES:
        raise BadInput(f"{path}: {unknown('format', format, SUFFIXES)}")
    if path.exists():
        raise BadInput(f"{path} exists and is not overwritten: give another --output or remove it")
    if not path.parent.is_dir():
        raise BadInput(f"--output {path}: the folder {path.parent} does not exist")
    if format == "onnx":
        return export_onnx(trained, path)
    export_safetensors(trained, path)
    return None


def export_safetensors(trained: Trained, path: Path) -> None:
    """Write parameters and buffers by name; the metadata holds the facts needed to use them.

    They go from the checkpoint to the file one by one, so the model needs no memory.
    """
    entries = [
        TensorEntry(name, tensor.dtype, tuple(tensor.shape))
        for name, tensor in sorted(trained.model.state_dict().items())
    ]
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        begin_tensors(temporary, entries, _metadata(trained))
        writer = TensorWriter(temporary, entries, _metadata(trained))
        for entry in entries:
            writer.put(entry.name, trained.weights[entry.name].to(entry.dtype))
        writer.close()
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def export_onnx(trained: Trained, path: Path) -> float:
    """Write a model of normalized images to logits, for any batch size; returns its difference to torch."""
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401  (torch's exporter needs it)
    except ImportError as error:
        raise BadInput(f"--format onnx needs {error.name}: {extra_command('onnx')}") from None
    model = trained.model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns of its own deprecations
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        program = torch.onnx.export(
            model,
            (torch.zeros(2, *trained.shape, dtype=torch.float32),),
            input_names=["images"],
            output_names=["logits"] if trained.is_classifier else None,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    proto = program.model_proto
    for key, value in _metadata(trained).items():
        proto.metadata_props.add(key=key, value=value)
    onnx.checker.check_model(proto)
    data = proto.SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    worst = 0.0
    for batch in (1, 3):
        generator = torch.Generator().manual_seed(batch)
        images = torch.randn(batch, *trained.shape, generator=generator, dtype=torch.float32)
        with torch.no_grad():
            wanted = leaves(model(images))
        found = session.run(None, {"images": images.numpy()})
        for expected, output in zip(wanted, found, strict=True):
            scale = max(float(expected.abs().max()), 1.0)
            worst = max(worst, float((torch.from_numpy(output) - expected).abs().max()) / scale)
    if not worst <= _TOLERANCE:
        raise LockstepError(
            f"onnxruntime differs from torch by {worst:.1e}, more than {_TOLERANCE:.0e}: not written"
        )
    write_durably(path, data)
    return worst


def _metadata(trained: Trained) -> dict[str, str]:
    """Class names, image shape and normalization: (pixel/255 − mean) / std."""
    model = trained.identity.get("source.model.class", trained.run.model.name)
    return {
        "lockstep": json.dumps(
            {
                "model": model.split()[0],
                "step": trained.step,
                "classes": trained.classes,
                "shape": trained.shape,
                "mean": trained.augment.mean,
                "std": trained.augment.std,
            }
        )
    }

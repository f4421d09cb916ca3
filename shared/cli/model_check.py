"""What can be said about a deployment's model before any process starts."""

from __future__ import annotations

from pathlib import Path

from stagemesh.shared.config import Config
from stagemesh.shared.core.layers import split_layers
from stagemesh.shared.errors import Rejected
from stagemesh.shared.model.source import open_model

NVIDIA_DRIVER = Path("/dev/nvidiactl")


def check_model(config: Config) -> None:
    """Raises Rejected if the model is not there or is not supported, if an instance's layers do not fit it, or if it is
    to run on GPUs and there are none. Loads no weights."""
    if config.model.device == "cuda":
        _check_gpus()
    model = open_model(config.model.spec).config
    model.check_device(config.model.device, config.model.spec)
    num_layers = model.num_layers
    for instance in config.instances:
        try:
            split_layers(num_layers, instance.pp_size, instance.layers)
        except Rejected as error:
            raise Rejected(f"instance {instance.name}, {error.field}", str(error).partition(": ")[2]) from None


def _check_gpus() -> None:
    """Without a word to CUDA: a process that has used it cannot fork others that do."""
    import torch

    if torch.version.cuda is None:
        raise Rejected("model.device", "'cuda' needs a CUDA build of PyTorch; this one is for the CPU")
    if not NVIDIA_DRIVER.exists():
        raise Rejected("model.device", f"'cuda' needs a GPU, and {NVIDIA_DRIVER} is not there")

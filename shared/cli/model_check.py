"""What can be said about a deployment's model before any process starts."""

from __future__ import annotations

from stagemesh.shared.config import Config
from stagemesh.shared.core.layers import split_layers
from stagemesh.shared.errors import Rejected
from stagemesh.shared.model.source import open_model


def check_model(config: Config) -> None:
    """Raises Rejected if the model is not there or is not supported, or if an instance's layers do not fit it. Loads
    no weights."""
    num_layers = open_model(config.model.spec).config.num_layers
    for instance in config.instances:
        try:
            split_layers(num_layers, instance.pp_size, instance.layers)
        except Rejected as error:
            raise Rejected(f"instance {instance.name}, {error.field}", str(error).partition(": ")[2]) from None

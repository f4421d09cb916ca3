"""The one TOML file of a deployment, as frozen structs that are right by construction of `load_config`."""

from stagemesh.shared.config.address import Address, parse_address
from stagemesh.shared.config.load import build_config, load_config, look_at_config
from stagemesh.shared.config.sections import (
    AuthSection,
    BrokerSection,
    Config,
    EngineSection,
    InstanceSection,
    MeshSection,
    MetricsSection,
    ModelSection,
    NatsSection,
    OpenaiSection,
    RouterSection,
    TlsSection,
    TransferSection,
)
from stagemesh.shared.config.write import dump_toml

__all__ = [
    "Address",
    "AuthSection",
    "BrokerSection",
    "Config",
    "EngineSection",
    "InstanceSection",
    "MeshSection",
    "MetricsSection",
    "ModelSection",
    "NatsSection",
    "OpenaiSection",
    "RouterSection",
    "TlsSection",
    "TransferSection",
    "build_config",
    "dump_toml",
    "load_config",
    "look_at_config",
    "parse_address",
]

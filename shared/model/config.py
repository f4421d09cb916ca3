"""The shape of a model, read from the files that come with its weights.

config.json + generation_config.json  -> `from_hf_dir`      (in `hf_config`)
GGUF metadata                         -> `from_gguf`        (in `gguf_config`)

Imports no torch: the router reads configs too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from stagemesh.shared.errors import Rejected

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
MAX_INTEGER: Final = (1 << 31) - 1  # of a size, or a token id: beyond what any of them can be
MAX_LAYERS: Final = 4096
MAX_EXPERTS: Final = 4096  # of a layer
MAX_NUMBER: Final = 1e30
MAX_SHOWN: Final = 300  # characters of what is wrong, in a complaint


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """`kind` is "linear", "llama3", "yarn" or "factors" (a divisor for each frequency, as GGUF files of Llama 3 carry
    them). All but the last use `factor`, llama3 and yarn `original_max_context` too; the two between are llama3's. The
    last four are yarn's: frequencies of more than `beta_fast` turns in the original context stay as they are, those
    of less than `beta_slow` are divided, with the bounds at whole frequencies if `truncate`; `attention_factor`
    multiplies queries and keys."""

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_context: int = 8192
    factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class Experts:
    """The MLP of a mixture: of `count` experts, each of `intermediate_size`, the router's likeliest `per_token` run for
    a token, weighted by their probabilities, which are made to add up to 1 if `normalised`."""

    count: int
    per_token: int
    intermediate_size: int
    normalised: bool


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family. `max_context` and `sliding_window` are in tokens; `torch_dtype` is torch's name
    of the dtype the weights were saved in; `attention_bias` is a bias on q, k and v, `output_bias` one on what follows
    them; `qk_norm` a norm of every head of q and k; `experts` stand in the place of the MLP in all layers."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_context: int
    tie_word_embeddings: bool
    sliding_window: int | None
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    experts: Experts | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    torch_dtype: str

    @property
    def head_layers(self) -> float:
        """What the head costs a decode step, counted in layers: by the weights that are read, and a quarter more for a
        layer, whose attention and small operations the weights do not show (measured on a 135M model)."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        experts = self.experts  # a batch of some size asks for all of them
        wide = experts.count * experts.intermediate_size if experts else self.intermediate_size
        layer = attention + 3 * self.hidden_size * wide
        return self.vocab_size * self.hidden_size / (1.25 * layer)

    def describe(self) -> dict[str, Any]:
        """Every field by name, of plain types: what fingerprints and manifests are made of."""
        return asdict(self)

    def check_device(self, device: str, spec: str) -> None:
        """Raises Rejected for what this kind of device does not compute yet."""
        if device == "cuda" and self.experts is not None:
            problem = f"num_local_experts: {self.experts.count} experts need model.device 'cpu', got {device!r}"
            raise Rejected("model", f"{spec}: {problem}")

    def check(self, source: Path) -> ModelConfig:
        """Itself, if the sizes fit together. Raises Rejected naming `source`."""
        if self.num_layers > MAX_LAYERS:
            problem = f"{self.num_layers} layers are more than {MAX_LAYERS}"
        elif self.num_heads % self.num_kv_heads:
            problem = f"{self.num_heads} heads are no multiple of {self.num_kv_heads} kv heads"
        elif self.head_dim % 2:
            problem = f"head_dim {self.head_dim} is odd, so it has no rotary pairs"
        elif (scaling := self.rope_scaling) and scaling.high_freq_factor <= scaling.low_freq_factor:
            problem = "rope scaling: high_freq_factor must be above low_freq_factor"
        elif scaling and scaling.kind == "factors" and len(scaling.factors) != self.head_dim // 2:
            problem = f"rope scaling: {len(scaling.factors)} factors for {self.head_dim // 2} frequencies"
        elif scaling and scaling.beta_fast <= scaling.beta_slow:
            problem = "rope scaling: beta_fast must be above beta_slow"
        elif (experts := self.experts) and experts.count > MAX_EXPERTS:
            problem = f"{experts.count} experts are more than {MAX_EXPERTS}"
        elif experts and experts.per_token > experts.count:
            problem = f"{experts.per_token} experts a token, of {experts.count}"
        else:
            return self
        raise Rejected("model", f"{source}: {problem}")


def shown(value: object) -> str:
    """A wrong value as a complaint shows it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # too many digits, or levels
        return f"a {type(value).__name__} that is too large to show"
    return shortened(text)


def shortened(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


@dataclass(frozen=True, slots=True)
class Settings:
    """Typed look-ups in the metadata of one file. Every complaint names the file and the key."""

    source: Path
    values: Mapping[str, Any]

    def complaint(self, key: str, problem: str) -> Rejected:
        return Rejected("model", f"{self.source}: {key}: {shortened(problem)}")

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer in 1..MAX_INTEGER; absent or null means `default`, which is an error if None."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.complaint(key, f"must be a positive integer, got {shown(value)}")
        if value > MAX_INTEGER:
            raise self.complaint(key, f"must be at most {MAX_INTEGER}, got {shown(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number; absent or null means `default`, which is an error if None."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_NUMBER:
            raise self.complaint(key, f"must be a positive number, got {shown(value)}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self.complaint(key, f"must be true or false, got {shown(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._present(key, default)
        if not isinstance(value, str):
            raise self.complaint(key, f"must be a string, got {shown(value)}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id, a list of them, or none."""
        value = self.values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(item) is int and 0 <= item <= MAX_INTEGER for item in ids):
            raise self.complaint(key, f"must be a token id or a list of them, got {shown(value)}")
        return tuple(ids)

    def _present(self, key: str, default: object) -> object:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise self.complaint(key, "is missing")
        return value

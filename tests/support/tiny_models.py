"""Random models of a few hundred kilobytes in Hugging Face directories, with a tokenizer and a chat template, made by
`transformers` so that it can be the reference for what we compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

Architecture = Literal["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"]

SPECIAL_TOKENS: Final = ("<unk>", "<s>", "</s>", "<|turn|>")  # ids 0..3
BOS_ID, EOS_ID = 1, 2
CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant') %}{{ raise_exception('unknown role') }}{% endif %}"
    "<|turn|>{{ message.role }}\n{{ message.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
OWN_SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "mistral": {"sliding_window": None},
    "qwen3": {"head_dim": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True},
}
CORPUS: Final = (
    "The river runs past the mill and under the old bridge, where the children wait for the boats.",
    "When the night train stops at the station, the lamps along the platform are lit one after the other.",
    "Every page of the ledger has its number, and every number is written twice so that nothing is lost.",
    "She counted the stars until the clouds came, then she counted the clouds until the morning came.",
    "The quick baker sells bread, butter, jam and honey to the quiet people of the northern village.",
)


def make_tiny(
    path: Path,
    architecture: Architecture = "llama",
    *,
    num_layers: int = 8,
    vocab_size: int = 320,
    seed: int = 0,
    dtype: str = "float64",
    max_context: int = 512,
    tie_word_embeddings: bool = False,
    max_shard_size: str = "1GB",
    **settings: Any,
) -> Path:
    """Writes a model of hidden size 64 with 4 heads and 2 kv heads to `path`, which it returns. `settings` go into the
    transformers config. Weights are large enough that greedy answers vary."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        architecture,
        num_hidden_layers=num_layers,
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_context,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        tie_word_embeddings=tie_word_embeddings,
        dtype=dtype,
        **OWN_SETTINGS.get(architecture, {}) | settings,
    )
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    _randomize(model, seed)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    write_tokenizer(path, vocab_size)
    return path


def write_tokenizer(path: Path, vocab_size: int = 320) -> None:
    """A byte-level BPE tokenizer of `vocab_size` tokens (260 at least), with its settings and a chat template."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _randomize(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 0.1 if parameter.ndim == 1 else 1.3 * parameter.shape[-1] ** -0.5
            parameter.copy_(noise * scale + (1 if "norm" in name else 0))

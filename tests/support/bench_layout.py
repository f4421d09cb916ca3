"""A mesh for a benchmark that runs on either device: a tiny model on the CPU, Mistral-7B's shape on GPUs."""

from __future__ import annotations

import argparse
from pathlib import Path

VOCAB = {"cpu": 320, "cuda": 32768}


def add_layout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--prefill-gpus", default="0,1", help="one for each stage")
    parser.add_argument("--decode-gpus", default="0,1")
    parser.add_argument("--prefill-pp", type=int, default=2, help="on the CPU")
    parser.add_argument("--decode-pp", type=int, default=2, help="on the CPU")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="of the deployment, as ENGINE__RUN_AHEAD=0")


def settings_of(options: argparse.Namespace) -> dict[str, str]:
    """For the environment of `stagemesh up`."""
    return {f"STAGEMESH_{key}": value for key, _, value in (pair.partition("=") for pair in options.settings)}


def prefill_stages(options: argparse.Namespace) -> int:
    if options.device == "cpu":
        return int(options.prefill_pp)
    return len(options.prefill_gpus.split(","))


def layout(options: argparse.Namespace, folder: Path) -> list[str]:
    """The options of `stagemesh up`; makes the model."""
    if options.device == "cpu":
        from tests.support.tiny_models import make_tiny

        path = make_tiny(folder / "model", vocab_size=VOCAB["cpu"], dtype="float32", max_context=1 << 15)
        return [f"--model={path}", f"--prefill-pp={options.prefill_pp}", f"--decode-pp={options.decode_pp}"]
    from tests.gpu.models import mistral_dir, write_tokenizer

    path = mistral_dir(folder / "model")
    write_tokenizer(path, VOCAB["cuda"])
    sides = (("prefill", options.prefill_gpus), ("decode", options.decode_gpus))
    gpus = [option for side, at in sides for option in (f"--{side}-pp={len(at.split(','))}", f"--{side}-gpus={at}")]
    return ["--device=cuda", f"--model=dummy:{path}", *gpus]

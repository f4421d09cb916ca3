"""Where models come from: what is loaded for a stage, what tells two models apart, and how broken ones are refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import stagemesh
from stagemesh.shared.core.layers import LayerRange
from stagemesh.shared.errors import Rejected
from stagemesh.shared.model.source import ModelSource, open_model
from stagemesh.shared.model.weights import StageWeights
from tests.support.tiny_models import make_tiny

ALL = LayerRange(0, 3)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("single"), num_layers=3, dtype="float32")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharded")
    return make_tiny(path, num_layers=3, dtype="float32", tie_word_embeddings=True, max_shard_size="150KB")


@pytest.fixture
def broken(single: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return shutil.copytree(single, tmp_path / "copy")


def tensors(weights: StageWeights) -> list[torch.Tensor]:
    """Every tensor of a stage once."""
    fields = [getattr(layer, name) for layer in weights.layers for name in layer.__dataclass_fields__]
    found = [*fields, weights.embedding, weights.norm, weights.lm_head]
    return list({tensor.data_ptr(): tensor for tensor in found if tensor is not None}.values())


def load(source: ModelSource, layers: LayerRange = ALL, dtype: torch.dtype = torch.float32) -> StageWeights:
    return source.load(layers, dtype, first=layers.lo == 0, last=layers.hi == 3)


@pytest.mark.parametrize("name", ["single", "sharded"])
@pytest.mark.parametrize("layers", [ALL, LayerRange(0, 1), LayerRange(1, 2), LayerRange(2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stage_holds_what_it_needs_and_as_many_bytes_as_foretold(
    request: pytest.FixtureRequest, name: str, layers: LayerRange, dtype: torch.dtype
) -> None:
    source = open_model(str(request.getfixturevalue(name)))
    first, last = layers.lo == 0, layers.hi == 3
    seen: list[tuple[int, int]] = []
    weights = source.load(
        layers, dtype, first=first, last=last, progress=lambda done, total: seen.append((done, total))
    )
    assert len(weights.layers) == len(layers)
    assert (weights.embedding is not None, weights.norm is not None, weights.lm_head is not None) == (first, last, last)
    foretold = source.weight_bytes(layers, dtype, first=first, last=last)
    assert sum(tensor.nbytes for tensor in tensors(weights)) == foretold
    assert {tensor.dtype for tensor in tensors(weights)} == {dtype}
    assert seen == sorted(seen)
    assert seen[-1] == (foretold, foretold)


def test_tied_embeddings_are_one_tensor_in_one_stage_and_two_in_two(sharded: Path) -> None:
    source = open_model(str(sharded))
    whole = load(source)
    assert whole.lm_head is whole.embedding
    last = load(source, LayerRange(2, 3))
    assert last.embedding is None
    assert whole.embedding is not None
    assert last.lm_head is not None
    assert torch.equal(last.lm_head, whole.embedding)


def test_loaded_weights_outlive_their_files(broken: Path) -> None:
    weights = load(open_model(str(broken)))
    before = [tensor.clone() for tensor in tensors(weights)]
    (broken / "model.safetensors").write_bytes(b"")
    assert all(torch.equal(now, then) for now, then in zip(tensors(weights), before, strict=True))


def change(broken: Path, name: str, value: torch.Tensor | None) -> None:
    """Replaces or removes one tensor."""
    file = broken / "model.safetensors"
    content = load_file(file)
    content.pop(name)
    save_file(content if value is None else {**content, name: value}, file)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, "cannot be read"),
        ("model.norm.weight", torch.ones(63), r"has shape \[63\], the model needs \[64\]"),
        ("lm_head.weight", torch.ones(320, 64, dtype=torch.int32), "unsupported dtype"),
    ],
)
def test_a_bad_tensor_is_named(broken: Path, name: str, value: torch.Tensor | None, problem: str) -> None:
    change(broken, name, value)
    with pytest.raises(Rejected, match=problem) as caught:
        load(open_model(str(broken)))
    assert name in str(caught.value)
    assert str(broken / "model.safetensors") in str(caught.value)


def test_a_stage_does_not_read_what_others_need(broken: Path) -> None:
    change(broken, "model.layers.1.mlp.up_proj.weight", None)
    assert len(load(open_model(str(broken)), LayerRange(2, 3)).layers) == 1


def test_a_truncated_file_is_named(broken: Path) -> None:
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(Rejected, match=r"model\.safetensors"):
        load(open_model(str(broken)))


def test_an_index_must_name_every_tensor_and_its_files_must_exist(sharded: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(sharded, tmp_path / "copy")
    index = copy / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    file = content["weight_map"].pop("model.norm.weight")
    index.write_text(json.dumps(content))
    with pytest.raises(Rejected, match=r"index\.json: tensor model\.norm\.weight is missing"):
        load(open_model(str(copy)))
    (copy / file).unlink()
    with pytest.raises(Rejected, match=file):
        load(open_model(str(copy)))


def test_a_directory_without_weights_opens_but_does_not_load(broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    source = open_model(str(broken))
    with pytest.raises(Rejected, match=r"has neither model\.safetensors nor"):
        load(source)
    assert len(load(open_model(f"dummy:{broken}")).layers) == 3


def test_fingerprints_differ_where_config_or_weights_do(single: Path, sharded: Path, broken: Path) -> None:
    plain = open_model(str(single)).fingerprint
    assert plain == open_model(str(broken)).fingerprint  # the same files elsewhere
    change(broken, "model.norm.weight", torch.zeros(64))
    others = [
        open_model(spec).fingerprint for spec in (str(broken), str(sharded), f"dummy:{single}", f"dummy:{single}#1")
    ]
    assert len({plain, *others}) == 5
    assert open_model(f"dummy:{single}").fingerprint == open_model(f"dummy:{single}#0").fingerprint


def test_dummy_weights_depend_on_seed_and_name_alone(single: Path) -> None:
    source = open_model(f"dummy:{single}#7")
    whole = load(source)
    for layer in range(3):
        part = load(source, LayerRange(layer, layer + 1), torch.bfloat16).layers[0]
        assert torch.equal(part.qkv, whole.layers[layer].qkv.bfloat16())
    assert not torch.equal(whole.layers[0].qkv, whole.layers[1].qkv)
    assert not torch.equal(whole.layers[0].qkv, load(open_model(f"dummy:{single}#8")).layers[0].qkv)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("no/such/model", "is none of smollm2, a model directory"),
        ("dummy:no/such/model", "is none of"),
        ("dummy:smollm2#x", "must be a seed"),
        (__file__, "is none of"),
    ],
)
def test_an_unknown_model_is_refused(spec: str, problem: str) -> None:
    with pytest.raises(Rejected, match=problem):
        open_model(spec)


def test_a_router_opens_a_model_without_torch(single: Path) -> None:
    code = (
        "import sys\nfrom stagemesh.shared.model.source import open_model\n"
        f"tokenizer = open_model({str(single)!r}).tokenizer()\n"
        "assert tokenizer.decode(tokenizer.encode('hello')) == 'hello'\nprint('torch' in sys.modules)"
    )
    root = Path(str(stagemesh.__file__)).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(root)}
    )
    assert done.stdout.strip() == "False"

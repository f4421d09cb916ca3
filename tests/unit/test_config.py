"""A config is either right as a whole or refused with the key, the limit and where the value came from."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.shared.config import Config, build_config, dump_toml, load_config, parse_address
from stagemesh.shared.config.local import LocalLayout, RoleLayout, local_document
from stagemesh.shared.errors import Rejected

RUN_DIR = Path("/run/stagemesh")


def document(**changes: Any) -> dict[str, Any]:
    return {**local_document(LocalLayout(), RUN_DIR), **changes}


def build(
    tables: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
    options: Mapping[str, object] | None = None,
) -> Config:
    return build_config(tables, source="mesh.toml", environ=environ or {}, options=options)


def instance(**changes: Any) -> dict[str, Any]:
    wanted = {"name": "decode-0", "role": "decode", "pp_size": 1, "stages": ["unix:/run/d.sock"], **changes}
    return {key: value for key, value in wanted.items() if value is not None}


PREFILL = {"name": "prefill-0", "role": "prefill", "pp_size": 1, "stages": ["unix:/run/p.sock"]}


def test_the_local_layout_is_two_pipelines_of_two_stages_on_unix_sockets() -> None:
    config = build(document())
    assert config.num_stages == 4
    assert [(i.name, i.role, i.pp_size) for i in config.instances] == [
        ("prefill-0", "prefill", 2),
        ("decode-0", "decode", 2),
    ]
    assert config.instance("decode-0").stages[1] == "unix:/run/stagemesh/decode-0.1.sock"
    assert config.router.listen == "127.0.0.1:8470"


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"mesh": {}}, "mesh.run_dir", "is missing"),
        ({"mesh": {"run_dir": "relative"}}, "mesh.run_dir", "absolute"),
        ({"mesh": {"run_dir": "/r", "name": "A b"}}, "mesh.name", "it is 'A b'"),
        ({"mash": {"run_dir": "/r"}}, "mash", "unknown key"),
        ({"engine": {"page_sise": 16}}, "engine.page_sise", "unknown key"),
        ({"engine": {"page_size": "16"}}, "engine.page_size", "expected a whole number"),
        ({"engine": {"page_size": 0}}, "engine.page_size", ">= 1; it is 0"),
        ({"engine": {"page_size": 5000}}, "engine.page_size", "<= 1024; it is 5000"),
        ({"engine": {"chunk_size": 64, "min_chunk_size": 65}}, "engine.min_chunk_size", "which is 64; got 65"),
        ({"engine": {"ring_slots": 2}}, "engine.ring_slots", "at least 3, for 2 stages"),
        ({"engine": {"ring_slots": 7, "extra_depth": 3, "run_ahead": 3}}, "engine.ring_slots", "at least 8"),
        ({"engine": {"page_size": True}}, "engine.page_size", "expected a whole number"),
        ({"engine": 5}, "engine", "expected a table"),
        ({"model": {"path": "m", "dtype": "int8"}}, "model.dtype", "one of float32, float64, bfloat16; it is 'int8'"),
        ({"nats": {"url": "http://here"}}, "nats.url", "nats://"),
        ({"broker": {"listen": "here"}}, "broker.listen", "unix:/path or host:port"),
        ({"broker": {"listen": "127.0.0.1:0"}}, "broker.listen", "port 0"),
        ({"router": {"listen": "127.0.0.1:70000"}}, "router.listen", "65535"),
        ({"broker": {"listen": "unix:sock"}}, "broker.listen", "absolute path"),
        ({"broker": {"listen": "unix:/" + "x" * 100}}, "broker.listen", "at most 100 bytes, got 101"),
        ({"router": {"listen": "unix:/run/stagemesh/broker.sock"}}, "broker.listen", "already the address of router"),
        ({"instances": []}, "instances", "[[instance]]"),
        ({"instance": {}}, "instance", "expected a list"),
        ({"instance": [PREFILL]}, "instance", "role decode"),
        ({"instance": [PREFILL, instance(role="both")]}, "instance[1].role", "one of prefill, decode; it is 'both'"),
        ({"instance": [PREFILL, instance(role=None)]}, "instance[1].role", "is missing"),
        ({"instance": [PREFILL, instance(pp_size=2)]}, "instance[1].stages", "pp_size is 2, got 1"),
        ({"instance": [PREFILL, instance(layers=[1, 2])]}, "instance[1].layers", "pp_size is 1, got [1, 2]"),
        ({"instance": [PREFILL, instance(layers=[0])]}, "instance[1].layers[0]", ">= 1; it is 0"),
        ({"instance": [PREFILL, instance(name="prefill-0")]}, "instance[1].name", "earlier instance"),
        ({"instance": [PREFILL, instance(stages=PREFILL["stages"])]}, "instance[1].stages[0]", "instance[0].stages[0]"),
    ],
)
def test_what_is_wrong_is_named_with_its_limit_and_its_file(changes: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(Rejected) as caught:
        build(document(**changes))
    assert caught.value.field == field
    assert says in str(caught.value)
    assert str(caught.value).endswith("(in mesh.toml)")


def test_the_environment_overrides_the_file_and_the_command_line_overrides_both() -> None:
    tables = document(engine={"page_size": 8, "chunk_size": 8, "num_pages": 8})
    environ = {"STAGEMESH_ENGINE__PAGE_SIZE": "32", "STAGEMESH_ENGINE__CHUNK_SIZE": "32", "STAGEMESH_LOG": "text"}
    config = build(tables, environ, {"engine.page_size": 64})
    assert (config.engine.page_size, config.engine.chunk_size, config.engine.num_pages) == (64, 32, 8)
    assert tables["engine"]["page_size"] == 8


@pytest.mark.parametrize(
    ("variable", "value", "read"),
    [
        ("NATS__CONNECT_TIMEOUT_S", "1.5", 1.5),
        ("ENGINE__NUM_PAGES", "null", None),
        ("MODEL__PATH", "1234", "1234"),
        ("MODEL__DTYPE", "bfloat16", "bfloat16"),
    ],
)
def test_an_override_has_the_type_of_its_key(variable: str, value: str, read: object) -> None:
    config = build(document(), {f"STAGEMESH_{variable}": value})
    section, key = variable.lower().split("__")
    assert getattr(getattr(config, section), key) == read


@pytest.mark.parametrize(
    ("variable", "value", "field"),
    [
        ("STAGEMESH_ENGINE__PAGE_SIZE", "many", "engine.page_size"),
        ("STAGEMESH_ENGINE__PAGE_SIZE", "0", "engine.page_size"),
        ("STAGEMESH_ENGINE__PAGE_SIZES", "1", "engine.page_sizes"),
        ("STAGEMESH_MOTOR__PAGE_SIZE", "1", "motor"),
        ("STAGEMESH_INSTANCES__NAME", "1", "instances"),
        ("STAGEMESH_BROKER__LISTEN", "nowhere", "broker.listen"),
    ],
)
def test_an_override_that_is_wrong_names_its_variable(variable: str, value: str, field: str) -> None:
    with pytest.raises(Rejected) as caught:
        build(document(), {variable: value})
    assert caught.value.field == field
    assert str(caught.value).endswith(f"(in {variable})")


def test_a_wrong_option_says_that_it_came_from_the_command_line() -> None:
    with pytest.raises(Rejected, match=r"model\.dtype: .*\(in the command line\)"):
        build(document(), options={"model.dtype": "int4"})


def test_a_file_that_is_not_there_or_not_toml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    with pytest.raises(Rejected, match=r"cannot read .*mesh\.toml: No such file"):
        load_config(path, {})
    path.write_text("[mesh")
    with pytest.raises(Rejected, match=r"mesh\.toml is not TOML"):
        load_config(path, {})


def test_an_unknown_instance_is_refused_with_those_there_are() -> None:
    with pytest.raises(Rejected, match="'decode-9'; there are prefill-0, decode-0"):
        build(document()).instance("decode-9")


paths = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)


@given(path=paths, sizes=st.lists(st.integers(1, 99), min_size=1, max_size=5), pages=st.none() | st.integers(1, 9999))
def test_what_is_written_reads_back_equal(path: str, sizes: list[int], pages: int | None) -> None:
    layout = LocalLayout(model=path, port=0, prefill=RoleLayout(len(sizes), 2, sizes))
    settings: dict[str, object] = {} if pages is None else {"engine.num_pages": pages}
    config = build(local_document(layout, RUN_DIR), options=settings)
    assert build(tomllib.loads(dump_toml(config))) == config


def test_addresses_read_back_as_grpc_takes_them() -> None:
    for text in ("unix:/run/x.sock", "127.0.0.1:8470", "[::1]:1", "node-7.example:65535"):
        assert str(parse_address(text, "here")) == text


@pytest.mark.parametrize(
    ("prefill", "decode", "fractions"),
    [
        (RoleLayout(2, gpus=(0, 1)), RoleLayout(2, gpus=(0, 1)), [0.45, 0.45]),
        (RoleLayout(1, gpus=(0,)), RoleLayout(1, gpus=(1,)), [0.9, 0.9]),
        (RoleLayout(2), RoleLayout(2), [0.225, 0.225]),
        (RoleLayout(1, gpus=(0,)), RoleLayout(2, 2, gpus=(0, 1, 2, 3)), [0.45, 0.45, 0.9]),
    ],
)
def test_stages_of_one_gpu_share_its_memory(prefill: RoleLayout, decode: RoleLayout, fractions: list[float]) -> None:
    config = build(local_document(LocalLayout(device="cuda", prefill=prefill, decode=decode), RUN_DIR))
    assert [instance.memory_fraction for instance in config.instances] == fractions

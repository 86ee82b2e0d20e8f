from dataclasses import replace

import pytest
from fakes import DictStore, FakeEngine, make_fleet

from warmers.errors import EngineMismatch
from warmers.fleet import EngineSpec, KVShape
from warmers.identity import require_match

FLEET = make_fleet()


def test_the_namespace_changes_with_everything_that_shapes_kv():
    engine, model = FLEET.engine, FLEET.model
    variants = [
        replace(FLEET, model=replace(model, weights_digest="c" * 64)),
        replace(FLEET, model=replace(model, path="/elsewhere")),
        replace(FLEET, model=replace(model, shape=KVShape(2, 2, 2))),
        *(
            replace(FLEET, engine=replace(engine, **{name: value}))
            for name, value in {
                "vllm": "0.33.0", "lmcache": "0.6.0", "dtype": "bfloat16", "tensor_parallel": 2, "block_tokens": 16,
                "chunk_tokens": 32, "kv_cache_dtype": "fp8", "attention_backend": "flash", "hash_algorithm": "sha256",
            }.items()
        ),
        replace(FLEET, name="other"),
    ]  # fmt: skip
    names = {FLEET.namespace, *(v.namespace for v in variants)}
    assert len(names) == len(variants) + 1
    assert replace(FLEET, ttl_s=1).namespace == FLEET.namespace


def test_adapters_leave_the_namespace_and_change_the_keyspace():
    one, other, second = (make_fleet(adapters=a) for a in ({"sql": "1"}, {"sql": "2"}, {"sql": "1", "law": "1"}))
    assert {f.namespace for f in (FLEET, one, other, second)} == {FLEET.namespace} == {FLEET.keyspace}
    assert len({f.keyspace for f in (FLEET, one, other, second)}) == 4
    turned = replace(second, adapters=second.adapters[::-1])
    assert turned.keyspace == second.keyspace


@pytest.mark.parametrize(
    ("adapters", "seen", "named"),
    [
        ({}, {"adapters": ("sql",)}, "serves the LoRA adapter sql, which is not in model.adapters"),
        ({"sql": "1"}, {"adapters": ()}, "does not serve the LoRA adapter sql"),
        ({"sql": "1"}, {"salt_table": None}, "its middleware is not on"),
        ({"sql": "1"}, {"salt_table": "none"}, "and it is none"),
    ],
)
def test_an_engine_whose_adapters_would_share_kv_is_refused(adapters, seen, named):
    fleet = make_fleet(adapters=adapters)
    fake = FakeEngine(fleet, DictStore())
    require_match(fleet, fake.identity(), fake.daemon_identity())
    with pytest.raises(EngineMismatch, match=named):
        require_match(fleet, replace(fake.identity(), **seen), fake.daemon_identity())


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (EngineSpec("v", "l", "bfloat16", chunk_tokens=256), 3145728),
        (EngineSpec("v", "l", "float32", chunk_tokens=256), 6291456),
        (EngineSpec("v", "l", "bfloat16", chunk_tokens=256, tensor_parallel=2), 1572864),
        (EngineSpec("v", "l", "bfloat16", chunk_tokens=256, kv_cache_dtype="fp8_e4m3"), 1572864),
    ],
)
def test_chunk_bytes(engine, expected):
    """3,145,728 bytes is what a real daemon stored for a 100 M model in bfloat16."""
    shape = KVShape(layers=12, kv_heads=4, head_dim=64)
    fleet = replace(FLEET, engine=engine, model=replace(FLEET.model, shape=shape))
    assert fleet.chunk_bytes == expected


@pytest.mark.parametrize(
    ("engine", "daemon", "named"),
    [
        ({"model_path": "/x"}, {}, "--model"),
        ({"vllm": "0.1"}, {}, "vLLM's version"),
        ({"dtype": "bfloat16"}, {}, "dtype"),
        ({"tensor_parallel": 4}, {}, "tensor parallel"),
        ({"connector": ""}, {}, "without a KV connector"),
        ({}, {"namespaces": ("other-ns",)}, "key prefix"),
        ({}, {"namespaces": ()}, "key prefix"),
        ({}, {"chunk_tokens": 512}, "chunk size"),
        ({}, {"engines": ()}, "registered"),
        ({}, {"hash_algorithm": "builtin"}, "hash algorithm"),
    ],
)
def test_an_engine_or_daemon_of_another_namespace_is_refused_by_name(engine, daemon, named):
    fake = FakeEngine(FLEET, DictStore())
    require_match(FLEET, fake.identity(), fake.daemon_identity())
    with pytest.raises(EngineMismatch, match=named):
        require_match(FLEET, replace(fake.identity(), **engine), replace(fake.daemon_identity(), **daemon))

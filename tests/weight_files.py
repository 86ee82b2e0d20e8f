"""Small model directories with real safetensors files, for tests of staging."""

import json
from pathlib import Path

import numpy as np

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "tie_word_embeddings": False,
}
LAYER = {
    "self_attn.q_proj": (8, 8),
    "self_attn.k_proj": (4, 8),
    "self_attn.v_proj": (4, 8),
    "self_attn.o_proj": (8, 8),
    "mlp.gate_proj": (16, 8),
    "mlp.up_proj": (16, 8),
    "mlp.down_proj": (8, 16),
    "input_layernorm": (8,),
    "post_attention_layernorm": (8,),
}


def tensors(seed=0):
    """Every tensor of that Llama, by name."""
    random = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (32, 8), "lm_head.weight": (32, 8), "model.norm.weight": (8,)}
    shapes |= {f"model.layers.{n}.{name}.weight": shape for n in range(2) for name, shape in LAYER.items()}
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in sorted(shapes.items())}


def safetensors(tensors):
    """The file of these tensors, as bytes."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in tensors.items():
        raw = tensor.tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def write_model(directory: Path, shards=2, seed=0, padding=0):
    """A complete model in shards; `padding`: bytes that each shard has more, in a tensor of its own."""
    directory.mkdir(parents=True, exist_ok=True)
    config = CONFIG | ({"architectures": ["OtherForCausalLM"]} if padding else {})
    whole = tensors(seed)
    names, where, total = sorted(whole), {}, 0
    for shard in range(shards):
        mine = {name: whole[name] for name in names[shard::shards]}
        if padding:
            filler = np.random.default_rng([seed, shard])
            mine[f"padding.{shard}"] = filler.integers(0, 2**31, padding // 4, np.int32).view(np.float32)
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        (directory / name).write_bytes(safetensors(mine))
        where |= dict.fromkeys(mine, name)
        total += sum(tensor.nbytes for tensor in mine.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("{}")
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return directory

"""Generate a LoRA adapter with random weights for the sample model, in PEFT's format.

As strong as the model's own weights, so that it answers otherwise than the base model. Runs in the engine environment:

    .venv-engine/bin/python deploy/local/make_adapter.py MODEL OUT [--seed 0]

The directory appears in one step, as the model's does.
"""

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

RANK = 8
ALPHA = 16
DEVIATION = 0.1
"""Of both factors: their scaled product deviates by ALPHA / RANK * sqrt(RANK) * 0.1 ** 2 = 0.057; the model by 0.06."""
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def shapes(model: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each projection, from the model's config.json."""
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    keys = hidden // heads * model["num_key_value_heads"]
    return {"q_proj": (hidden, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden), "o_proj": (hidden, hidden)}


def weights(model: dict[str, int], seed: int):
    """Both factors of every projection in every layer, by their names in PEFT."""
    import torch

    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(model["num_hidden_layers"]):
        for target, (outputs, inputs) in shapes(model).items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            tensors[f"{name}.lora_A.weight"] = DEVIATION * torch.randn(RANK, inputs, generator=random)
            tensors[f"{name}.lora_B.weight"] = DEVIATION * torch.randn(outputs, RANK, generator=random)
    return tensors


def build(model: Path, out: Path, seed: int) -> None:
    from safetensors.torch import save_file

    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(TARGETS),
    }
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        save_file(weights(json.loads((model / "config.json").read_text()), seed), scratch / "adapter_model.safetensors")
        (scratch / "adapter_config.json").write_text(json.dumps(config, indent=2))
        scratch.chmod(0o755)
        os.replace(scratch, out)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate a LoRA adapter, unless it is there.")
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.out.exists():
        print(f"{args.out}: already there")
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    build(args.model, args.out, args.seed)
    print(f"{args.out}: made")


if __name__ == "__main__":
    main()

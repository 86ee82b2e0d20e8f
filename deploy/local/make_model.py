"""Generate the sample model: a Llama with random weights and a BPE tokenizer trained here.

Nothing is downloaded: the tokenizer learns from Python's own standard library, the weights come from a
fixed seed. Runs in the engine environment (torch, tokenizers, transformers):

    .venv-engine/bin/python deploy/local/make_model.py OUT [--size 100m] [--seed 0] [--dtype bfloat16]

The directory appears in one step (written beside OUT, then renamed), so a kill leaves no half model.
"""

import argparse
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path

# layers, hidden, intermediate, heads, kv heads, vocabulary
SIZES = {
    "tiny": (4, 256, 768, 4, 2, 8192),
    "34m": (8, 512, 1536, 8, 4, 8192),
    "100m": (12, 768, 2048, 12, 4, 16384),
}
MAX_POSITIONS = 8192
SPECIAL = ["<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
{% if messages and messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools

Call a tool by answering with one JSON object in <tool_call></tool_call>. These tools exist:
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools><|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if not (tools and loop.first and message.role == 'system') -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def standard_library_texts(limit: int = 250):
    """Yield the texts of the first `limit` modules of the standard library, in name order."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:limit]:
        yield path.read_text(errors="ignore")


def train_tokenizer(vocab_size: int):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet)
    bpe.train_from_iterator(standard_library_texts(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        model_max_length=MAX_POSITIONS,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build(out: Path, size: str, seed: int, dtype: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, hidden, intermediate, heads, kv_heads, vocab = SIZES[size]
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=0,
        eos_token_id=SPECIAL.index("<|im_end|>"),
        pad_token_id=2,
        tie_word_embeddings=False,
        # Wider than the usual 0.02, so that random weights react to what stands in their context.
        initializer_range=0.06,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.generation_config.eos_token_id = SPECIAL.index("<|im_end|>")
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        train_tokenizer(vocab).save_pretrained(scratch)
        model.save_pretrained(scratch)
        scratch.chmod(0o755)
        os.replace(scratch, out)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate the sample model, unless it is there.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", choices=SIZES, default="100m")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    if args.out.exists():
        print(f"{args.out}: already there")
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    build(args.out, args.size, args.seed, args.dtype)
    print(f"{args.out}: made")


if __name__ == "__main__":
    main()

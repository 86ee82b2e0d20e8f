"""What the Run:ai streamer makes of staged safetensors files: their SHA-256, put together from the tensors it gives.

Runs in the engine's environment, as an engine loads weights: one JSON document on standard input, a list of
{"uri", "header"} with the file's start up to its first tensor in base64; one on standard output, a SHA-256 for each.
A safetensors file has no holes, so its tensors in the order of their offsets are the rest of it.
"""

import base64
import json
import sys
from hashlib import sha256

import torch
from runai_model_streamer import SafetensorsStreamer

LENGTH_BYTES = 8


def digest(uri: str, start: bytes) -> str:
    """SHA-256 of one file, 64 hex digits; its tensors are held in memory, as the streamer does anyway."""
    entries = json.loads(start[LENGTH_BYTES:])
    names = sorted((name for name in entries if name != "__metadata__"), key=lambda n: entries[n]["data_offsets"])
    whole = sha256(start)
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(uri)
        tensors = dict(streamer.get_tensors())
        for name in names:
            whole.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy())
    return whole.hexdigest()


def main() -> None:
    """Of every file asked for."""
    asked = json.load(sys.stdin)
    print(json.dumps([digest(each["uri"], base64.b64decode(each["header"])) for each in asked]))


if __name__ == "__main__":
    main()

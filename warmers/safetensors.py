"""The header of a safetensors file: parsed, and checked against the file's size. Reading files does not belong here.

The format: eight bytes with the header's length (little endian), the header as JSON, then the tensors' data without a
hole (https://huggingface.co/docs/safetensors).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
BITS: Mapping[str, int] = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Bits of one number, by dtype."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Of its data, in bytes behind the header."""
    end: int

    @property
    def parameters(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """What one file says that it holds."""

    tensors: tuple[Tensor, ...]

    @property
    def parameters(self) -> int:
        """Numbers in all its tensors."""
        return sum(tensor.parameters for tensor in self.tensors)

    @property
    def data_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.end - tensor.start for tensor in self.tensors)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Distinct dtypes, sorted."""
        return tuple(sorted({tensor.dtype for tensor in self.tensors}))


def header_bytes(start: bytes, file_bytes: int) -> int:
    """Length of the JSON header by the file's first eight bytes. Raises ValueError where that cannot be."""
    if len(start) < LENGTH_BYTES:
        raise ValueError(f"{file_bytes} bytes are too short for a safetensors file")
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if length > min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
        raise ValueError(
            f"its header would be {length:,} bytes long in a file of {file_bytes:,}: cut off, or no safetensors"
        )
    return length


def parse_header(raw: bytes, file_bytes: int) -> Header:
    """The header, from its JSON. Raises ValueError that says what is wrong with it, or with the file's size."""
    try:
        entries = json.loads(raw)
    except ValueError as error:
        raise ValueError(f"its header is no JSON ({error})") from None
    if not isinstance(entries, dict):
        raise ValueError("its header is no JSON object")
    tensors = sorted(
        (_tensor(name, entry) for name, entry in entries.items() if name != "__metadata__"),
        key=lambda t: (t.start, t.end),
    )
    _require_gapless(tensors, file_bytes - LENGTH_BYTES - len(raw))
    return Header(tuple(tensors))


def _tensor(name: str, entry: Any) -> Tensor:
    try:
        start, end = entry["data_offsets"]
        tensor = Tensor(name, entry["dtype"], tuple(entry["shape"]), start, end)
        numbers = (start, end, *tensor.shape)
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"tensor {name!r} has no dtype, shape and data_offsets") from None
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"tensor {name!r}: shape {list(tensor.shape)} or offsets [{start}, {end}] are no counts")
    if tensor.dtype not in BITS:
        raise ValueError(f"tensor {name!r} has the unknown dtype {tensor.dtype!r}")
    if (end - start) * 8 != tensor.parameters * BITS[tensor.dtype]:
        raise ValueError(
            f"tensor {name!r}: {end - start:,} bytes are not {list(tensor.shape)} numbers of {tensor.dtype}"
        )
    return tensor


def _require_gapless(tensors: Sequence[Tensor], data_bytes: int) -> None:
    at = 0
    for tensor in tensors:
        if tensor.start != at:
            what = (
                "overlaps the one before it" if tensor.start < at else f"leaves a hole of {tensor.start - at:,} bytes"
            )
            raise ValueError(f"tensor {tensor.name!r} {what}")
        at = tensor.end
    if at != data_bytes:
        raise ValueError(f"its tensors take {at:,} bytes, and the file has {data_bytes:,} behind its header")

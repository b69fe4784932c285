"""Log values as short text: any type, any length, any encoding; never an exception and never a control code.

`plain` gives the same value as something JSON can hold.
"""

from __future__ import annotations

import math
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

LARGEST_LISTED_ARRAY = 64
_BLOCKS = "▁▂▃▄▅▆▇█"


def format_value(value: Any, *, max_length: int = 60, ascii_only: bool = False) -> str:
    """`0.6931`, `1,024`, `5e-05`, `-`, `float32[3, 4]`, or a string cut to `max_length`; always on one line."""
    value = plain(value)
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return clean(value if isinstance(value, str) else str(value), max_length=max_length, ascii_only=ascii_only)


def clean(text: str, *, max_length: int = 60, ascii_only: bool = False) -> str:
    """One printable line: breaks become spaces, other control characters `?`, the rest is cut with three dots."""
    text = " ".join(text[: 4 * max_length].split())
    text = "".join("?" if unicodedata.category(c) in ("Cc", "Cf", "Cs") else c for c in text)
    if ascii_only:
        text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= max_length else text[: max_length - 3] + "..."


def plain(value: Any) -> Any:
    """A copy made of None, bool, int, float, str, list and dict: tensors of one element become numbers.

    Arrays of more than `LARGEST_LISTED_ARRAY` elements, images and unknown objects become a short description.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if is_image(value):
        return f"[image {value.width}x{value.height}]"
    if isinstance(value, (np.ndarray, np.generic)) or _is_tensor(value):
        return _plain_array(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (Sequence, set, frozenset)) and not isinstance(value, (bytes, bytearray)):
        return [plain(v) for v in value]
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001  (a broken __repr__ of a user's object must not stop a run)
        return f"<{type(value).__name__}: {type(error).__name__} in repr>"


def is_image(value: Any) -> bool:
    """Whether it is an image of PIL, which is not loaded for that: where nobody has, there is none."""
    library = sys.modules.get("PIL.Image")
    return library is not None and isinstance(value, library.Image)


def _is_tensor(value: Any) -> bool:
    """Does not load torch, for the report: where nobody has, there is no tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _plain_array(array: Any) -> Any:
    is_tensor, foreign = _is_tensor(array), False
    if is_tensor:
        import torch

        # Reading a tensor subclass such as DTensor may be a collective, and only one rank is here.
        foreign = type(array) not in (torch.Tensor, torch.nn.Parameter)
    size = array.numel() if is_tensor else array.size
    if size > LARGEST_LISTED_ARRAY or foreign:
        return f"{str(array.dtype).removeprefix('torch.')}{list(array.shape)}"
    items = array.detach().cpu().tolist() if is_tensor else array.tolist()
    if size == 1:
        while isinstance(items, list):
            items = items[0]
    return items if isinstance(items, (bool, int, float, str, list)) else repr(items)


def as_number(value: Any) -> float | None:
    """The value as a float where it is one number, else None."""
    value = plain(value)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def sparkline(values: Sequence[float]) -> str:
    """One block a value, from the lowest to the highest of them; `!` marks what is not finite.

    Fewer than two values draw nothing.
    """
    if len(values) < 2:
        return ""
    finite = [v for v in values if math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    middle = _BLOCKS[len(_BLOCKS) // 2 - 1]

    def block(value: float) -> str:
        if not math.isfinite(value):
            return "!"
        return _BLOCKS[round((value - low) * scale)] if scale else middle

    return "".join(block(v) for v in values)


def format_count(value: float) -> str:
    """`950`, `12.3k`, `4.56M`, `7.89G`: three figures."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """`0:01:12`, `13:00:05`, `2d 01:00:00`."""
    total = max(0, round(seconds))
    days, rest = divmod(total, 86400)
    hours, minutes, secs = rest // 3600, rest // 60 % 60, rest % 60
    return f"{days}d {hours:02}:{minutes:02}:{secs:02}" if days else f"{hours}:{minutes:02}:{secs:02}"

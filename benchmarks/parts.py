"""Sorts the operations of a profiled step into parts: products, attention, head, elementwise, copies, optimizer.

Self times are added, so the parts and "outside operations" (Python, dispatch, waiting) add up to the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd import DeviceType

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "mkldnn_linear", "_addmm_activation", "dot"})
_COPY_NAMES = """
copy_ _to_copy to cat clone contiguous fill_ zero_ zeros zeros_like ones ones_like new_zeros empty empty_like
empty_strided new_empty new_empty_strided empty_permuted full full_like index index_select index_add index_add_
index_put index_put_ _index_put_impl_ index_copy_ gather scatter scatter_ scatter_add scatter_add_ slice_backward
select_backward slice_scatter select_scatter stack split split_with_sizes narrow embedding embedding_dense_backward
embedding_backward constant_pad_nd pad repeat_interleave expand_copy masked_fill masked_fill_ resize_ _unsafe_index
reshape _reshape_copy _copy_from record_stream pin_memory _local_scalar_dense item
"""
_VIEW_NAMES = "view as_strided transpose t slice select unsqueeze squeeze expand permute detach alias _unsafe_view"
COPIES, VIEWS = frozenset(_COPY_NAMES.split()), frozenset(_VIEW_NAMES.split())
HEAD_TILE = 32768
"""Vocabulary tile of a chunked head (ours and TRL's); the last tile is the remainder."""
PARTS: tuple[str, ...] = (
    "matrix products",
    "attention forward",
    "attention backward",
    "head",
    "elementwise",
    "copies and gathers",
    "optimizer and clipping",
    "other",
    "outside operations",
)


def head_widths(vocabulary: int) -> frozenset[int]:
    """Widths by which an operation is known to belong to the output head."""
    return frozenset({vocabulary, HEAD_TILE, vocabulary % HEAD_TILE}) - frozenset({0})


def _is_attention(name: str) -> bool:
    return "scaled_dot_product" in name or "flash_attention" in name or "efficient_attention" in name or "flex" in name


def part_of(name: str, shapes: list[Any], in_optimizer: bool, widths: frozenset[int]) -> str:
    """The part an operation belongs to.

    `shapes` are its input shapes. A product is the head's if any dimension is a vocabulary width; another operation
    if its last dimension is: gradients and casts of a tied embedding [vocabulary, hidden] are not the head's work.
    """
    bare = name.removeprefix("aten::")
    if in_optimizer or bare.startswith(("_foreach", "_fused_adam", "_amp_")) or name.startswith("Optimizer."):
        return "optimizer and clipping"
    sizes = [s for s in shapes if s and all(isinstance(d, int) for d in s)]
    if bare in PRODUCTS:
        return "head" if any(d in widths for s in sizes for d in s) else "matrix products"
    if _is_attention(bare):
        return "attention backward" if "backward" in bare.lower() else "attention forward"
    if any(s[-1] in widths for s in sizes):
        return "head"
    if bare in COPIES:
        return "copies and gathers"
    if not name.startswith("aten::") or bare in VIEWS:
        return "other"
    return "elementwise"


def _inside_optimizer(event: Any) -> bool:
    while event is not None:
        if event.name.startswith("Optimizer."):
            return True
        event = event.cpu_parent
    return False


def seconds_by_part(events: Any, wall: float, vocabulary: int, device: str) -> dict[str, float]:
    """Seconds of a step in each part; on a GPU the time of the kernels that each operation launched."""
    seconds = dict.fromkeys(PARTS, 0.0)
    widths = head_widths(vocabulary)
    own_time: Callable[[Any], float]
    if device == "cuda":
        own_time = lambda e: e.self_device_time_total  # noqa: E731
    else:
        own_time = lambda e: e.self_cpu_time_total  # noqa: E731
    for event in events:
        # Kernels also appear as events of their own; their time is already with the operation that launched them.
        if event.device_type != DeviceType.CPU or event.is_user_annotation:
            continue
        time_s = own_time(event) / 1e6
        if time_s > 0:
            part = part_of(event.name, event.input_shapes or [], _inside_optimizer(event), widths)
            seconds[part] += time_s
    seconds["outside operations"] = max(0.0, wall - sum(seconds.values()))
    return seconds

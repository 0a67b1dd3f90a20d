"""Masks of transformers without a matrix: what a mask function says, and how it travels through a model to attention.

transformers describes who sees whom by a function of indices, composed of parts (causal, sliding window, chunks, packed
documents, bidirectional blocks), and asks :func:`mask` for what the model's layers hand on to the attention function.
Where the parts are known the answer has N numbers per sequence, not M × N:

- None: causal if the layer is, in the layer's sliding window;
- truth values [B, N]: the same, with some keys hidden;
- truth values [B, 1, M, N] with a stride of 0 over the rows: both ways, with some keys hidden;
- integers [B, 1, C, N], a *coded mask* (:class:`Code`): documents, a cache longer than what it holds, blocks.

All else is transformers' own matrix. ``transformers_attention.py`` reads it. This file may import
``transformers_dispatch.py``.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    sdpa_mask,
)
from transformers.utils.import_utils import is_tracing

from .transformers_dispatch import MaskForm, check_models_of_config, mask_form_of_config


class Code(enum.IntEnum):
    """How many rows a coded mask [B, 1, C, N] has, which says what they mean, also where a compiler sees only sizes.

    The mask is a tensor of four dimensions since generation with a compiled model passes nothing else on. Row 0 always
    has the document d of each key, 0 and above, and ~d for keys that are hidden: as queries they see others still.
    """

    DOCUMENTS = 1  # causal within documents; the queries are the last tokens
    LENGTHS = 2  # row 1: how many keys there are so far; the queries are the last of those
    BLOCKS = 3  # row 2: the block b of each key, -1 for none, -2 - b for hidden keys; tokens of a block see each other
    AROUND = 4  # C = 4 + w: w keys on either side of a query, at the same place, are seen


NO_BLOCK = -1  # of a key
NO_BLOCK_OF_QUERY = -(2**31)  # so that it shares none with a key


class Pattern(NamedTuple):
    """The parts of a mask function: pairs are seen that fulfil all of them."""

    causal: bool = False
    window: int | None = None  # causal: so many keys, the query's own included; else: so many on either side
    documents: Callable[[Tensor, Tensor], Tensor] | None = None  # of (batch [B, 1], places [1, N]), as integers [B, N]
    blocks: Tensor | None = None  # pairs in one block, 0 and above, are seen though they are not causal


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    config: PreTrainedConfig | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask for ``attention_forward``: None, one or a few numbers per key where they say it all, else a matrix.

    Raises :class:`ArgumentError` for a model that does not call the attention function.
    """
    form = MaskForm.FLASH
    if config is not None:
        form = mask_form_of_config(type(config))
        # Layers may have been replaced since, but a step of generation is too short to look at them all
        check_models_of_config(id(config), torch.compiler.is_dynamo_compiling() or q_length > 1)
    sizes = Sizes(batch_size, q_length, kv_length, q_offset, kv_offset)
    if form > MaskForm.EAGER:
        pattern = _read_pattern(mask_function, allow_is_causal_skip, local_size, config, kwargs)
        if pattern is not None and pattern.causal:
            found, said = _say_causal(pattern, sizes, attention_mask, form, allow_is_causal_skip, kwargs.get("device"))
        elif pattern is not None:
            allowed = kwargs.get("allow_is_bidirectional_skip", False)
            found, said = _say_both_ways(pattern, sizes, attention_mask, form, allowed, kwargs.get("device"))
        if pattern is not None and said:
            return found
    kwargs.update(local_size=local_size, allow_is_causal_skip=False)
    if form == MaskForm.EAGER:
        return eager_mask(*sizes, mask_function, attention_mask, **kwargs)
    return sdpa_mask(*sizes, mask_function, attention_mask, **kwargs | dict(allow_is_bidirectional_skip=False))


class Sizes(NamedTuple):
    """Of the mask: query m stands at place ``q_offset`` + m, key n at ``kv_offset`` + n."""

    batch: int
    queries: int
    keys: int
    q_offset: Any  # a tensor for a static cache: reading it would synchronise, and break a compiled model's graph
    kv_offset: int

    @property
    def aligned(self) -> bool:
        """True where it is known that the last query is the last key."""
        return not isinstance(self.q_offset, Tensor) and self.filled == self.keys

    @property
    def filled(self) -> Any:
        """How many keys there are up to the last query; the others are places of a static cache not yet filled."""
        return self.q_offset + self.queries - self.kv_offset


_Said = tuple[Tensor | None, bool]  # a mask, and whether it says all that the pattern says
_NOT_SAID: _Said = (None, False)


def _say_causal(
    pattern: Pattern, sizes: Sizes, padding: Tensor | None, form: MaskForm, allowed: bool, device: Any
) -> _Said:
    """A causal mask without its matrix. ``allowed``: that nothing but the causal order may be left to the layer."""
    if pattern.window is not None and form < MaskForm.FLASH:
        return _NOT_SAID  # only FlashAttention's interface tells the attention function of a layer's window
    plain = pattern.documents is None and pattern.blocks is None
    if sizes.aligned and _shows_all(padding):
        padding = None
    if sizes.aligned and plain:
        if not allowed:
            return _NOT_SAID  # somebody wants to see the matrix
        if padding is None and (form == MaskForm.FLASH or sizes.queries in (1, sizes.keys)):
            return None, True
        if padding is not None and form == MaskForm.FLASH and padding.shape[-1] == sizes.kv_offset + sizes.keys:
            return padding[:, -sizes.keys :].bool(), True
    if form < MaskForm.FLEX or (isinstance(sizes.filled, int) and not sizes.queries <= sizes.filled <= sizes.keys):
        return _NOT_SAID
    if pattern.blocks is not None and pattern.blocks.shape[-1] < sizes.kv_offset + sizes.keys:
        return _NOT_SAID
    places = torch.arange(sizes.keys, device=device)[None] + sizes.kv_offset
    if pattern.documents is None:
        documents = places.new_zeros(1).expand(sizes.batch, sizes.keys)
    else:
        documents = pattern.documents(torch.arange(sizes.batch, device=device)[:, None], places)
        if padding is not None:  # chunks are counted from the first token that is no padding
            documents = documents + (sizes.kv_offset + sizes.keys)
    rows = [_hide(documents, padding, sizes)]
    if pattern.blocks is not None or not sizes.aligned:
        rows.append(torch.zeros_like(rows[0]) + sizes.filled)
    if pattern.blocks is not None:
        within = slice(sizes.kv_offset, sizes.kv_offset + sizes.keys)
        blocks = pattern.blocks[:, within].expand(sizes.batch, -1)
        hidden = torch.where(blocks < 0, NO_BLOCK, -2 - blocks)
        rows.append(blocks if padding is None else torch.where(_shown(padding, sizes), blocks, hidden))
    return torch.stack([row.long() for row in rows], 1)[:, None], True


def _say_both_ways(
    pattern: Pattern, sizes: Sizes, padding: Tensor | None, form: MaskForm, allowed: bool, device: Any
) -> _Said:
    """A mask that is not causal without its matrix. ``allowed``: that None may stand for all pairs."""
    if pattern.documents is not None or pattern.blocks is not None:
        return _NOT_SAID
    if padding is not None and padding.shape[-1] >= sizes.kv_offset + sizes.keys and _shows_all(padding):
        padding = None
    if pattern.window is None:
        if padding is None and allowed:
            return None, True  # a layer whose masks are made both ways says that it is not causal
        shown = torch.ones(sizes.batch, 1, dtype=torch.bool, device=device)
        if padding is not None:
            shown = _shown(padding, sizes)
        return shown[:, None, None].expand(-1, -1, sizes.queries, sizes.keys), True
    if form < MaskForm.FLEX or not sizes.aligned or sizes.queries != sizes.keys:
        return _NOT_SAID
    documents = torch.zeros(sizes.batch, sizes.keys, dtype=torch.long, device=device)
    row = _hide(documents, padding, sizes)
    return row[:, None, None].expand(-1, -1, Code.AROUND + pattern.window, -1), True


def _shows_all(padding: Tensor | None) -> bool:
    """True where no key is hidden; looked at as transformers does, never while a graph is being traced."""
    return padding is None or (not is_tracing(padding) and bool(padding.all()))


def _shown(padding: Tensor, sizes: Sizes) -> Tensor:
    """Which keys are shown, as truth values [B, N]; what lies beyond the given ones is not."""
    missing = sizes.kv_offset + sizes.keys - padding.shape[-1]
    if missing > 0:
        padding = F.pad(padding, (0, missing))
    return padding[:, sizes.kv_offset : sizes.kv_offset + sizes.keys].bool()


def _hide(documents: Tensor, padding: Tensor | None, sizes: Sizes) -> Tensor:
    return documents if padding is None else torch.where(_shown(padding, sizes), documents, ~documents)


# What attention does with it


class CodedMask(NamedTuple):
    """A coded mask as attention takes it."""

    causal: bool
    window: tuple[int, int] | None
    documents: tuple[Tensor, Tensor]  # of queries [B, M] and keys [B, N]
    lengths: Tensor | None
    blocks: tuple[Tensor, Tensor] | None


def read_code(code: Tensor, queries: int) -> CodedMask:
    """What a coded mask [B, 1, C, N] says of the M queries."""
    rows = code[:, 0]
    keys = rows[:, 0]
    if rows.shape[1] >= Code.AROUND:
        width = rows.shape[1] - Code.AROUND
        return CodedMask(False, (width, width), (_as_queries(keys), keys), None, None)
    if rows.shape[1] == Code.DOCUMENTS:
        return CodedMask(True, None, (_as_queries(keys[:, -queries:]), keys), None, None)
    lengths = rows[:, 1, 0]
    places = lengths[:, None] - queries + torch.arange(queries, device=code.device)
    blocks = None
    if rows.shape[1] == Code.BLOCKS:
        own = rows[:, 2].gather(1, places)
        own = torch.where(own < NO_BLOCK, -2 - own, own)
        blocks = (torch.where(own < 0, NO_BLOCK_OF_QUERY, own), rows[:, 2])
    return CodedMask(True, None, (_as_queries(keys.gather(1, places)), keys), lengths, blocks)


def _as_queries(documents: Tensor) -> Tensor:
    """The documents of queries, of which none are hidden."""
    return torch.where(documents < 0, ~documents, documents)


# Mask functions


def _read_pattern(
    function: Callable, allow_is_causal_skip: bool, local_size: int | None, config: Any, kwargs: dict
) -> Pattern | None:
    """The parts of a mask function, None where one of them is not known."""
    if function is causal_mask_function:
        return Pattern(causal=True)
    if function is bidirectional_mask_function:
        return Pattern()
    if torch.compiler.is_dynamo_compiling():
        return _infer_pattern(function, allow_is_causal_skip, local_size, config, kwargs)
    parts = _parts(function)
    return None if parts is None else _join(parts)


def _parts(function: Any) -> list[tuple[str, dict[str, Any]]] | None:
    """The parts that are all to be fulfilled: the name of the function that made each, and what was given to it."""
    if function is causal_mask_function:
        return [("causal", {})]
    if function is bidirectional_mask_function:
        return []
    if getattr(function, "__module__", None) != causal_mask_function.__module__ or not hasattr(function, "__code__"):
        return None
    cells = function.__closure__ or ()
    given = dict(zip(function.__code__.co_freevars, (c.cell_contents for c in cells), strict=True))
    maker = function.__qualname__.partition(".")[0]
    if maker == "and_masks":
        found = [_parts(f) for f in given["mask_functions"]]
        return None if None in found else [part for parts in found for part in parts or ()]
    if maker == "or_masks":
        others = [f for f in given["mask_functions"] if f is not causal_mask_function]
        blocks = _parts(others[0]) if len(others) == 1 and len(given["mask_functions"]) == 2 else None
        if blocks is not None and [name for name, _ in blocks] == ["blockwise_overlay"]:
            return [("causal_or_block", blocks[0][1])]
        return None
    return [(maker, given)]


def _join(parts: list[tuple[str, dict[str, Any]]]) -> Pattern | None:
    names = [name for name, _ in parts]
    if len(set(names)) < len(names):
        return None
    found = dict(parts)
    by_place: list[Callable[[Tensor, Tensor], Tensor]] = []
    pattern = Pattern(causal="causal" in found or "causal_or_block" in found)
    for name, given in parts:
        if name == "causal_or_block":
            pattern = pattern._replace(blocks=given["block_sequence_ids"])
        elif name == ("sliding_window_overlay" if pattern.causal else "sliding_window_bidirectional_overlay"):
            pattern = pattern._replace(window=given["sliding_window"])
        elif name == "packed_sequence_mask_function":
            by_place.append(functools.partial(_packed_documents, given["packed_sequence_mask"]))
        elif name == "chunked_overlay":
            by_place.append(functools.partial(_chunks, given["chunk_size"], given["left_padding"]))
        elif name != "causal":
            return None
    if by_place:
        pattern = pattern._replace(documents=lambda batch, places: _number_documents(by_place, batch, places))
    return pattern


def _packed_documents(ids: Tensor, batch: Tensor, places: Tensor) -> Tensor:
    return ids[batch, places]


def _chunks(size: int, start: Tensor, batch: Tensor, places: Tensor) -> Tensor:
    return (places - start[batch]) // size


def _number_documents(by_place: list[Callable], batch: Tensor, places: Tensor) -> Tensor:
    """One number for each combination of documents, 0 and above for tokens that are not padding."""
    found = by_place[0](batch, places)
    for numbers in by_place[1:]:
        found = found * (places.shape[-1] + 1) + numbers(batch, places)
    return found


def _infer_pattern(
    function: Callable, allow_is_causal_skip: bool, local_size: int | None, config: Any, kwargs: dict
) -> Pattern | None:
    """:func:`_read_pattern` inside Dynamo, which cannot read closures: from what transformers passes beside it.

    A conjunction that is not somebody's own (``use_vmap``) is causal order, then a window or chunks of ``local_size``,
    then packed documents; or a window both ways. Documents and chunks are stretches of tokens: one ends where a token
    does not see the one before it.
    """
    if kwargs.get("use_vmap") or not function.__qualname__.startswith("and_masks."):
        return None
    if "allow_is_bidirectional_skip" in kwargs:
        return None if local_size is None else Pattern(window=local_size)
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    if local_size is not None and (local_size == window) == (local_size == chunk):
        return None
    windowed = local_size is not None and local_size == window
    if windowed and allow_is_causal_skip:
        return Pattern(causal=True, window=window)

    def documents(batch: Tensor, places: Tensor) -> Tensor:
        before = function(batch, torch.zeros_like(batch), places, (places - 1).clamp(min=0))
        return (~before).cumsum(-1)

    return Pattern(causal=True, window=window if windowed else None, documents=documents)

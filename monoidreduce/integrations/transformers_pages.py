"""Keys and values of ``model.generate`` in pages: a cache of transformers that our attention function reads.

A prompt's keys and values go to attention as they are, and then into pages of their layer without the padding before
them. From then on a layer's update writes the new tokens and hands the pages themselves to the attention function
(:func:`pages_of`), so that no step copies or pads what is there. All layers have the same pages in stores of their own;
which page is whose is kept on the host. This file may import the errors and the domains.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ..domains import Pages
from ..errors import ArgumentError
from .transformers_dispatch import NAME

_MARK = "_monoidreduce_layer"  # on tensors that a layer hands to attention


class PagedKeyValueCache(Cache):
    """The keys and values of ``model.generate`` in pages, for models with ``attn_implementation="monoidreduce"``.

    ``config``: the model's; ``page``: tokens of a page. Sequences of unequal length (padded on the left) take as many
    pages as they have tokens. Beam search and assisted generation are refused: they reorder or drop what is held.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from monoidreduce.integrations.transformers import PagedKeyValueCache, register
    >>> register()
    >>> config = LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    ... )
    >>> config._attn_implementation = "monoidreduce"
    >>> model, prompt = LlamaForCausalLM(config), torch.tensor([[1, 2, 3]])
    >>> how = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
    >>> paged = model.generate(prompt, past_key_values=PagedKeyValueCache(config), **how)
    >>> torch.equal(paged, model.generate(prompt, **how))
    True
    """

    def __init__(self, config: Any, page: int = 64):
        if getattr(config, "_attn_implementation", None) != NAME:
            raise ArgumentError(
                detail=f"the model's attention is {getattr(config, '_attn_implementation', None)!r}, which reads no "
                "pages",
                fix=f'Load the model with attn_implementation="{NAME}"',
            )
        self.book = _PageTable(page)
        super().__init__(layer_class_to_replicate=functools.partial(PagedLayer, self.book))  # type: ignore[arg-type]


class _PageTable:
    """Which pages each sequence has, the same in all layers."""

    def __init__(self, page: int):
        self.page = page
        self.clear()

    def clear(self) -> None:
        self.padding: list[int] = []
        self.owned: list[list[int]] = []
        self.count = 0  # pages that belong to someone
        self.known: dict[int, Pages] = {}  # by how many tokens there are: before and after a step

    def begin(self, padding: list[int]) -> None:
        self.padding, self.owned = padding, [[] for _ in padding]

    def grow(self, tokens: int, device: torch.device) -> Pages:
        """The pages of all sequences when there are so many tokens; those that are missing are taken."""
        found = self.known.get(tokens)
        if found is None:
            lengths = [tokens - n for n in self.padding]
            for owned, length in zip(self.owned, lengths, strict=True):
                more = -(-length // self.page) - len(owned)
                owned += range(self.count, self.count + more)
                self.count += max(more, 0)
            most = max(map(len, self.owned), default=0)
            table = torch.tensor([o + [0] * (most - len(o)) for o in self.owned], dtype=torch.int32)
            lengths_of = torch.tensor(lengths, dtype=torch.int32)
            found = Pages(table.view(-1, most).to(device), lengths_of.to(device), self.page)
            self.known = {n: pages for n, pages in [*self.known.items()][-1:]} | {tokens: found}
        return found


class PagedLayer(CacheLayerMixin):
    """One layer's keys and values: ``keys`` and ``values`` are pages [pages, page, heads, f]."""

    is_sliding = False

    def __init__(self, book: _PageTable, **kwargs: Any):
        super().__init__(**kwargs)
        self.book, self.tokens = book, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write new tokens [B, heads, T, f]; returns the pages or, of a prompt, the tokens themselves."""
        first = not self.is_initialized
        if first:
            self.lazy_initialization(key_states, value_states)
            keys, values = key_states, value_states
        else:
            held = self.book.grow(self.tokens, self.device)
            self._write(held, key_states, value_states)
            assert self.keys is not None and self.values is not None
            keys, values = self.keys, self.values
        self.tokens += key_states.shape[2]
        keys = keys.view(keys.shape)  # an object of its own, for the mark
        setattr(keys, _MARK, self)
        return keys, values

    def write_prompt(self, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
        """Put a prompt's tokens into pages. ``mask`` [B, N]: which of them are there; None: all."""
        batch, length = keys.shape[0], keys.shape[2]
        if not self.book.owned:
            self.book.begin(_count_padding(mask, batch, length))
        moved = torch.tensor(self.book.padding, device=keys.device)
        place = torch.arange(length, device=keys.device)
        at = ((place + moved[:, None]) % max(length, 1)).view(batch, 1, length, 1)  # padding goes to the end
        keys, values = (t.gather(2, at.expand(t.shape)) for t in (keys, values))
        empty = Pages(self.book.grow(length, keys.device).table, torch.zeros_like(moved), self.book.page)
        self._write(empty, keys, values, length - moved)

    def _write(self, held: Pages, keys: Tensor, values: Tensor, counts: Tensor | None = None) -> None:
        grown = self.book.grow(self.tokens + (keys.shape[2] if counts is None else 0), keys.device)
        self.keys, self.values = (
            _resize(t, self.book.count, new, self.book.page) for t, new in ((self.keys, keys), (self.values, values))
        )
        held = Pages(grown.table, held.lengths, self.book.page)
        held.append((self.keys, self.values), (keys, values), counts)

    def pages(self) -> Pages:
        """The pages of all sequences."""
        return self.book.grow(self.tokens, self.device)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a mask has numbers for, and where they begin."""
        return self.tokens + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens that are held, with padding."""
        return self.tokens

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.keys = self.values = None
        self.tokens, self.is_initialized = 0, False
        self.book.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refused."""
        raise ArgumentError(
            detail="beam search reorders the cache, whose pages belong to their sequences",
            fix="Generate without beams, or leave past_key_values out",
        )


def layer_of(key: Tensor) -> PagedLayer | None:
    """The layer that handed keys to attention; None for any other keys."""
    return getattr(key, _MARK, None)


def _count_padding(mask: Tensor | None, batch: int, length: int) -> list[int]:
    """How many tokens of each sequence stand for nothing; all of them come first."""
    if mask is None:
        return [0] * batch
    padding = (~mask.bool()).sum(-1)
    first = torch.arange(length, device=mask.device) < padding[:, None]
    if mask.shape != (batch, length) or bool((first == mask.bool()).any()):
        raise ArgumentError(
            detail=f"a mask of shape {tuple(mask.shape)} hides tokens that are not padding before a prompt",
            fix='Pad on the left (tokenizer.padding_side = "left"), or leave past_key_values out',
        )
    return padding.tolist()


def _resize(store: Tensor | None, pages: int, like: Tensor, page: int) -> Tensor:
    """Pages with room for so many, at least; twice as many where there are too few."""
    held = 0 if store is None else len(store)
    if store is not None and held >= pages:
        return store
    heads, width = like.shape[1], like.shape[3]
    made = like.new_zeros(max(pages, 2 * held), page, heads, width)
    if store is not None:
        made[:held] = store
    return made

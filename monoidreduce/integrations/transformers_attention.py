"""Attention for Hugging Face transformers: the attention function, and its registration.

transformers asks a registered mask function (``transformers_masks.py``) for the mask of a forward pass and hands the
result, through the model's own code, to the registered attention function here. Models differ in how much of what the
two agree on reaches the attention function; ``transformers_dispatch.py`` reads that from their classes.

``transformers.py`` re-exports the public names. This file may import the errors, the domains, the ops and the two
files above.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface

from ..domains import Jagged, Pages
from ..errors import ArgumentError
from ..ops import attention, attention_paged, checks
from ..ops.attention import attention_in_blocks
from .transformers_dispatch import (
    NAME,
    MaskForm,
    check_attention,
    check_dispatch,
    check_models_when_made,
    mask_form_of_config,
    mask_form_of_layer,
)
from .transformers_masks import mask, read_code

__all__ = ["NAME", "attention_forward", "check_attention", "check_dispatch", "mask", "register"]

recorded_outputs: Any = None
with contextlib.suppress(ImportError):  # what a forward pass records; not all models pass `output_attentions` on
    from transformers.utils.output_capturing import _active_collector as recorded_outputs


def register() -> None:
    """Make ``attn_implementation="monoidreduce"`` a choice for every model of transformers.

    A model whose layers do not call the registered attention function (Bloom, MPT, Falcon and others with attention
    code of their own) raises :class:`ArgumentError` when it is made with this choice, or when it first runs where the
    choice was written into its configuration later.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from monoidreduce.integrations.transformers import register
    >>> register()
    >>> config = LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    ... )
    >>> config._attn_implementation = "monoidreduce"
    >>> LlamaForCausalLM(config)(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 50])
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask)
    check_models_when_made()


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    cache: Any = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: ``query`` [B, H, M, f], ``key`` and ``value`` [B, Hkv, N, f] give [B, M, H, f].

    ``attention_mask`` is what :func:`mask` returned: None (causal if the layer is, in its sliding window), one truth
    value per key [B, N] (causal besides, in the sliding window; the last query is aligned with the last key), a coded
    mask of integers, or a matrix [B, 1, M, N] that contains everything. Without one, ``cu_seq_lens_q`` and
    ``cu_seq_lens_k`` say where documents begin, as FlashAttention takes them. ``indices`` [B, M, k] are the keys that
    an indexer chose for each query (DeepSeek-V3.2, GLM-5), beside a mask that is a matrix.

    Raises :class:`ArgumentError` for ``output_attentions``, for ``block_indices`` (blocks of keys that an indexer
    chose) and for the paged cache of continuous batching.
    """
    if output_attentions or _records_attentions():
        raise ArgumentError(
            detail=f"output_attentions=True asks {type(module).__name__} for attention weights, which are never built",
            fix='Leave it out, or use attn_implementation="eager" where the weights are needed',
        )
    if cache is not None:
        raise ArgumentError(
            detail=f"continuous batching passes a paged cache to the attention of {type(module).__name__}, which is "
            "not supported",
            fix='Use model.generate, or attn_implementation="sdpa" for generate_batch',
        )
    if block_indices is not None:
        raise ArgumentError(
            detail=f"{type(module).__name__} passes blocks of keys that its indexer chose (block_indices) to the "
            "attention function, which are not supported",
            fix='Use attn_implementation="eager" or "sdpa" for this model',
        )
    if indices is not None:  # models put them into the mask themselves for the implementations that they know by name
        attention_mask = _keep_chosen(attention_mask, indices, key.shape[2])
    attend: Any = attention
    options: dict[str, Any] = {}
    layer = layer_of(key)
    if layer is not None and layer.keys is not None:
        options = {} if sliding_window is None else {"window": (sliding_window - 1, None)}
        found = attention_paged(
            query, key, value, layer.pages(), scale=scaling, softcap=softcap, sinks=s_aux, **options
        )
        return found.transpose(1, 2).contiguous(), None
    if layer is not None:
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ArgumentError(
                detail=f"keys in pages are seen as far as a sequence goes, and the mask of {type(module).__name__} "
                "says more",
                fix="Leave PagedKeyValueCache out",
            )
        layer.write_prompt(key, value, attention_mask)
    if attention_mask is None:
        asked = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        config = getattr(module, "config", None)
        form = mask_form_of_layer(type(module)) if config is None else mask_form_of_config(type(config))
        # A layer that says `is_causal` may also be used for cross-attention, where nothing is masked.
        causal = bool(asked) and (form == MaskForm.FLASH or (form > MaskForm.EAGER and query.shape[2] == key.shape[2]))
        windowed = causal and form == MaskForm.FLASH
        if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
            options |= _packed(cu_seq_lens_q, cu_seq_lens_k, query, key)
    elif attention_mask.dim() == 2:
        causal = windowed = True
        options["attn_mask"] = attention_mask[:, None, None, :]
    elif attention_mask.dtype is torch.bool or attention_mask.is_floating_point():
        causal = windowed = False
        # A row that stands for all is read once
        options["attn_mask"] = attention_mask[:, :, :1] if attention_mask.stride(2) == 0 else attention_mask
    else:
        code = read_code(attention_mask, query.shape[2])
        causal = windowed = code.causal
        options.update(documents=code.documents, lengths=code.lengths, window=code.window)
        if code.blocks is not None:
            attend, options["blocks"] = attention_in_blocks, code.blocks
    if windowed and sliding_window is not None:
        options["window"] = (sliding_window - 1, None)
    found = attend(
        query,
        key,
        value,
        dropout_p=dropout,
        causal="lower_right" if causal else False,
        scale=scaling,
        softcap=softcap,
        bias=position_bias,
        sinks=s_aux,
        enable_gqa=query.shape[1] != key.shape[1],
        **options,
    )
    return found.transpose(1, 2).contiguous(), None


def _keep_chosen(attention_mask: Tensor | None, indices: Tensor, keys: int) -> Tensor:
    """A mask [B, 1, M, N] that also hides all keys but those that were chosen, ``indices`` [B, M, k]."""
    chosen = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter(-1, indices.long(), True).unsqueeze(1)
    if attention_mask is None or attention_mask.dtype is torch.bool:
        return chosen if attention_mask is None else attention_mask & chosen
    return attention_mask.masked_fill(~chosen, -torch.inf)


def _packed(rows: Tensor, cols: Tensor, query: Tensor, key: Tensor) -> dict[str, Any]:
    """Packed documents, from where they begin and end in the flattened batch. One row of tokens is jagged, and its
    documents' queries are the last of their keys; otherwise queries and keys are the same tokens, with numbers."""
    _check_offsets("cu_seq_lens_q", rows, query)
    _check_offsets("cu_seq_lens_k", cols, key)
    if query.shape[0] == 1 and (rows is cols or query.shape[2] != key.shape[2]):
        return {"cols": Jagged(rows, cols)}
    return {"documents": (_documents(rows, query), _documents(cols, key))}


def _check_offsets(name: str, offsets: Tensor, tokens: Tensor) -> None:
    """Raise unless offsets end with the number of tokens."""
    batch, length = tokens.shape[0], tokens.shape[2]
    if checks.can_inspect(offsets) and (offsets.numel() == 0 or int(offsets[-1]) != batch * length):
        raise ArgumentError(
            detail=f"{name} ends at {int(offsets[-1]) if offsets.numel() else 'nothing'}, but there are "
            f"{batch * length} tokens",
            fix="Give where each document begins and the number of tokens, as DataCollatorWithFlattening does",
        )


def _documents(offsets: Tensor, tokens: Tensor) -> Tensor:
    """The document of each token [B, L]."""
    batch, length = tokens.shape[0], tokens.shape[2]
    places = torch.arange(batch * length, device=offsets.device, dtype=offsets.dtype)
    return torch.bucketize(places, offsets[1:].contiguous(), right=True).view(batch, length)


def _records_attentions() -> bool:
    """Whether the model was called with ``output_attentions`` (or has it in its configuration)."""
    if recorded_outputs is None or torch.compiler.is_dynamo_compiling():
        return False
    asked = recorded_outputs.get()
    return bool(asked) and any(name.endswith("attentions") for name in asked)


# Keys and values of ``model.generate`` in pages: a cache of transformers that our attention function reads.
#
# A prompt's keys and values go to attention as they are, and then into pages of their layer without the padding before
# them. From then on a layer's update writes the new tokens and hands the pages themselves to the attention function, so
# that no step copies or pads what is there. All layers have the same pages in stores of their own; which page is whose
# is kept on the host.

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
        checks.whole("page", page, least=1)
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
            table = torch.tensor([o + [0] * (most - len(o)) for o in self.owned], dtype=torch.int32, device="cpu")
            lengths_of = torch.tensor(lengths, dtype=torch.int32, device="cpu")
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

    def crop(self, max_length: int) -> None:
        """Refused."""
        raise ArgumentError(
            detail="assisted generation drops tokens from the cache, whose pages are written once",
            fix="Generate without an assistant or prompt lookup, or leave past_key_values out",
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

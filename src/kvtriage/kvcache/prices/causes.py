"""Why the engine reserves more than the worksheet counts: a sum of causes that has no rest.

Every block that a request is reserved is as large as the widest group, so its bytes fall apart exactly:

    bytes of a block  =  pages of the group's layers  +  places left empty           GROUP_PADDING
    page              =  tokens that fit in it        +  what it is padded by        PAGE_PADDING
    tokens of blocks  =  tokens reserved              +  the rest of the last block  BLOCK_ROUNDING
    tokens reserved   =  tokens that are retained     +  tokens in flight            IN_FLIGHT
    bytes of a token  =  its elements                 +  scales of its own           ROW_SCALES

The blocks of a state hold one state each, and all but one are copies (STATE_COPIES).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from kvtriage.kvcache.allocator.layers import ChunkedLayer, IndexLayer, SlidingLayer, StateLayer
from kvtriage.kvcache.allocator.pages import LayerPage
from kvtriage.kvcache.allocator.pool import Pool
from kvtriage.kvcache.allocator.report import blocks_of_layer
from kvtriage.kvcache.allocator.settings import ServingLimits
from kvtriage.kvcache.prices.held import held_tokens

__all__ = ["CAUSE_WORDS", "Cause", "CauseKind", "Contents", "contents_of", "reserve_causes"]


class CauseKind(enum.StrEnum):
    """What adds bytes, from the K and V of one request to the memory of the server.

    STATES          recurrent states: part of the worksheet, and out of the policy's reach
    INDEX_KEYS      what sparse layers choose by: part of the worksheet, and out of the policy's reach
    LENGTH          the line counts requests of max_model_len, and this one is of another length
    ROW_SCALES      scales that sparse latent layers keep in each FP8 row
    AS_FULL         windows or chunks allocated as full attention: they hold the whole text
    LEFT_OUT        layers that a block-outermost layout leaves out of its blocks (negative)
    IN_FLIGHT       tokens scheduled and not yet settled, for which windows and chunks must have room
    STATE_COPIES    states beside the live one: for prefix caching, for tokens that are only guessed
    BLOCK_ROUNDING  the rest of the last block, and one block more where a window starts inside one
    PAGE_PADDING    pages made as large as others
    GROUP_PADDING   places of a block that the group of layers leaves empty
    STAGES          the same, less the layers that lie on other pipeline stages (negative)
    NULL_BLOCK      the block that stands for nothing; once a server, and counted in its line
    REMAINDER       memory that fills no whole block, and the line's own rounding; once a server
    """

    STATES = "states"
    INDEX_KEYS = "index_keys"
    LENGTH = "length"
    ROW_SCALES = "row_scales"
    AS_FULL = "windows_as_full"
    LEFT_OUT = "left_out"
    IN_FLIGHT = "tokens_in_flight"
    STATE_COPIES = "state_copies"
    BLOCK_ROUNDING = "block_rounding"
    PAGE_PADDING = "page_padding"
    GROUP_PADDING = "group_padding"
    STAGES = "other_stages"
    NULL_BLOCK = "null_block"
    REMAINDER = "remainder"


CAUSE_WORDS: Mapping[CauseKind, str] = {
    CauseKind.STATES: "recurrent states",
    CauseKind.INDEX_KEYS: "keys of the sparse index",
    CauseKind.ROW_SCALES: "scales in the rows of latents",
    CauseKind.LENGTH: "counted for the longest request",
    CauseKind.AS_FULL: "windows allocated at full length",
    CauseKind.LEFT_OUT: "layers left out of the blocks",
    CauseKind.IN_FLIGHT: "tokens in flight",
    CauseKind.STATE_COPIES: "copies of states",
    CauseKind.BLOCK_ROUNDING: "rounding to blocks",
    CauseKind.PAGE_PADDING: "padding of pages",
    CauseKind.GROUP_PADDING: "empty places in groups",
    CauseKind.STAGES: "less the layers of other stages",
    CauseKind.NULL_BLOCK: "the null block, once a server",
    CauseKind.REMAINDER: "rest of the memory, rounding",
}
"""How each is called before people."""


@dataclass(frozen=True)
class Cause:
    """`reserved_bytes` it adds, and what that does to the tokens of the line: fewer are negative.

    `tokens` is None where the engine prints no line.
    """

    kind: CauseKind
    reserved_bytes: int
    tokens: int | None


@dataclass(frozen=True)
class Contents:
    """The worksheet of one request on one GPU, in bytes: what a policy reaches, and what it does not."""

    kv_bytes: int
    state_bytes: int
    index_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.kv_bytes + self.state_bytes + self.index_bytes


def contents_of(pages: tuple[LayerPage, ...], limits: ServingLimits, length: int) -> Contents:
    """What the layers behind `pages` hold of a text of `length`. Give the pages as they are before they are grouped."""
    kv_bytes = state_bytes = index_bytes = 0
    for page in pages:
        held = page.num_layers * held_tokens(page, limits, length)
        match page.layer:
            case StateLayer(state_bytes=size):
                state_bytes += held * size
            case IndexLayer(token_bytes=size):
                index_bytes += held * size
            case _:
                kv_bytes += held * _element_bytes(page)
    return Contents(kv_bytes, state_bytes, index_bytes)


def reserve_causes(pool: Pool, limits: ServingLimits, length: int, contents: Contents) -> Mapping[CauseKind, int]:
    """Bytes of each cause, from the worksheet to what a request of `length` is reserved. They may be 0."""
    sums = dict.fromkeys(CauseKind, 0)
    grouped = 0
    empty = CauseKind.GROUP_PADDING if pool.settings.pipeline_parallel_size == 1 else CauseKind.STAGES
    for group in pool.groups:
        blocks = group.copies * blocks_of_layer(group.pages[0], pool.settings, limits, length)
        sums[empty] += blocks * (pool.bytes_per_block - group.filled_bytes)
        for page in group.pages:
            layers, token_bytes = group.copies * page.num_layers, _token_bytes(page)
            held, reserved = held_tokens(page, limits, length), _reserved_tokens(page, limits, length)
            beyond = CauseKind.STATE_COPIES if isinstance(page.layer, StateLayer) else CauseKind.BLOCK_ROUNDING
            grouped += layers * held * _element_bytes(page)
            sums[CauseKind.ROW_SCALES] += layers * held * (token_bytes - _element_bytes(page))
            sums[CauseKind.IN_FLIGHT] += layers * (reserved - held) * token_bytes
            sums[beyond] += blocks * page.num_layers * page.natural_bytes - layers * reserved * token_bytes
            sums[CauseKind.PAGE_PADDING] += blocks * page.num_layers * (page.page_bytes - page.natural_bytes)
    regrouped = grouped - contents.total_bytes
    sums[CauseKind.AS_FULL if regrouped > 0 else CauseKind.LEFT_OUT] = regrouped
    return sums


def _token_bytes(page: LayerPage) -> int:
    """Bytes that one token takes in a page of one layer; of a state, all of it."""
    if isinstance(page.layer, StateLayer) or page.block_size is None:
        return page.natural_bytes
    return page.natural_bytes // page.block_size


def _element_bytes(page: LayerPage) -> int:
    """The same without scales that are kept in the row."""
    if isinstance(page.layer, StateLayer | IndexLayer):
        return _token_bytes(page)
    return page.layer.num_kv_heads * (page.layer.head_size + page.layer.head_size_v) * page.dtype.element_bytes


def _reserved_tokens(page: LayerPage, limits: ServingLimits, length: int) -> int:
    """Tokens that a request of `length` is given room for, before that is rounded to blocks."""
    match page.layer:
        case SlidingLayer(window=window):
            return min(window - 1 + limits.retained_tokens + limits.tokens_in_flight, length)
        case ChunkedLayer(chunk=chunk):
            return min(chunk + limits.tokens_in_flight, length)
        case _:
            return held_tokens(page, limits, length)

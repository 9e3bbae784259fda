"""Paged attention, reference back end: plain torch on any device, batch-invariant.

Selective batching (Orca, OSDI'22, section 3.2) lives here: every token-wise operator of the
model runs on the flat tensor of all scheduled tokens, and this one function splits attention
per sequence over the block tables (PagedAttention, SOSP'23, section 4).

Batch invariance. A query row must give the same bits whatever else is in the step: so every
product has one fixed shape, [TILE_ROWS, head_dim] x [head_dim, block_size], padded with rows that are thrown
away, and the sums over blocks are done one block after the other. A longer padding only
appends exact zeros.
"""

from dataclasses import dataclass

import torch

from services.worker.model.backend import SequenceSpan

TILE_ROWS = 16
# Blocks gathered at once: bounds the scratch memory and keeps it near the cache.
GROUP_BLOCKS = 512


@dataclass(frozen=True)
class TileGroup:
    """Query tiles that are computed together. T tiles of TILE_ROWS rows, N blocks of context.

    rows: [T, P] index into the flat tensor of the step (P positions a tile; padding repeats a valid row).
    tables: [T, N] block ids (padding is block 0, masked).
    masked: [T, N, 1, M, block_size] True where a key is not visible.
    out_tile, out_pos, out_row: [V] the V valid (tile, position) pairs and their rows in the flat tensor.
    """

    rows: torch.Tensor
    tables: torch.Tensor
    masked: torch.Tensor
    out_tile: torch.Tensor
    out_pos: torch.Tensor
    out_row: torch.Tensor


def positions_per_tile(group_size: int) -> int:
    """Query positions in a tile: group_size query heads share a key head, so a tile has P x group_size rows."""
    return max(1, TILE_ROWS // group_size)


def build_tile_groups(
    spans: list[SequenceSpan], block_size: int, group_size: int, device: torch.device
) -> list[TileGroup]:
    """Cut the step's rows into tiles, sorted by context so that padding is short."""
    per_tile = positions_per_tile(group_size)
    tiles: list[tuple[int, SequenceSpan, int, int]] = []
    for span in spans:
        for offset in range(0, span.length, per_tile):
            count = min(per_tile, span.length - offset)
            last_position = span.context - span.length + offset + count - 1
            tiles.append((last_position // block_size + 1, span, offset, count))
    tiles.sort(key=lambda tile: tile[0])
    groups: list[TileGroup] = []
    begin = 0
    for end in range(1, len(tiles) + 1):
        full = end < len(tiles) and (end + 1 - begin) * tiles[end][0] > GROUP_BLOCKS
        if end == len(tiles) or full:
            groups.append(_build_group(tiles[begin:end], block_size, group_size, device))
            begin = end
    return groups


def _build_group(
    tiles: list[tuple[int, SequenceSpan, int, int]], block_size: int, group_size: int, device: torch.device
) -> TileGroup:
    per_tile = positions_per_tile(group_size)
    num_blocks = tiles[-1][0]
    rows, tables, positions = [], [], []
    out_tile: list[int] = []
    out_pos: list[int] = []
    out_row: list[int] = []
    for index, (blocks, span, offset, count) in enumerate(tiles):
        first = span.start + offset
        rows.append([first + min(i, count - 1) for i in range(per_tile)])
        tables.append(span.block_table[:blocks] + [0] * (num_blocks - blocks))
        first_position = span.context - span.length + offset
        positions.append([first_position + min(i, count - 1) for i in range(per_tile)])
        out_tile += [index] * count
        out_pos += range(count)
        out_row += range(first, first + count)
    query = torch.tensor(positions, device=device).repeat_interleave(group_size, dim=1)
    query = _pad_rows(query, dim=1)
    key = torch.arange(num_blocks * block_size, device=device).view(1, num_blocks, 1, 1, block_size)
    return TileGroup(
        rows=torch.tensor(rows, device=device),
        tables=torch.tensor(tables, device=device),
        masked=key > query.view(len(tiles), 1, 1, -1, 1),
        out_tile=torch.tensor(out_tile, device=device),
        out_pos=torch.tensor(out_pos, device=device),
        out_row=torch.tensor(out_row, device=device),
    )


def _pad_rows(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Repeat the last row until the tile has TILE_ROWS rows (a no-op when it has that many or more)."""
    missing = TILE_ROWS - tensor.shape[dim]
    if missing <= 0:
        return tensor
    return torch.cat(
        [
            tensor,
            tensor.narrow(dim, tensor.shape[dim] - 1, 1).expand(
                *[missing if d == dim else size for d, size in enumerate(tensor.shape)]
            ),
        ],
        dim=dim,
    )


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    groups: list[TileGroup],
    scale: float,
) -> torch.Tensor:
    """Causal attention of every scheduled row over its sequence's blocks.

    query: [rows, num_heads, head_dim]; caches: [num_blocks, num_kv_heads, block_size, head_dim], already
    holding this step's keys and values. Returns [rows, num_heads, head_dim]; rows of no sequence are zero.
    """
    out = torch.zeros_like(query)
    for group in groups:
        _attend(query, key_cache, value_cache, group, scale, out)
    return out


def _attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    group: TileGroup,
    scale: float,
    out: torch.Tensor,
) -> None:
    _, num_heads, head_dim = query.shape
    _, kv_heads, block_size, _ = key_cache.shape
    num_tiles, num_blocks = group.tables.shape
    group_size = num_heads // kv_heads
    # [T, P, kv, G, d] -> [T, kv, P*G, d] -> padded [T, kv, M, d]
    tile = query[group.rows].view(num_tiles, -1, kv_heads, group_size, head_dim)
    tile = _pad_rows(tile.transpose(1, 2).reshape(num_tiles, kv_heads, -1, head_dim), dim=2) * scale
    num_rows = tile.shape[2]
    flat = (num_tiles * num_blocks * kv_heads, num_rows)
    keys = key_cache[group.tables].view(-1, block_size, head_dim)
    queries = tile.unsqueeze(1).expand(-1, num_blocks, -1, -1, -1).reshape(*flat, head_dim)
    scores = torch.bmm(queries, keys.transpose(1, 2)).view(num_tiles, num_blocks, kv_heads, num_rows, block_size)
    scores = scores.float().masked_fill_(group.masked, float("-inf"))
    weights = torch.exp_(scores - scores.amax(dim=(1, 4), keepdim=True))
    values = value_cache[group.tables].view(-1, block_size, head_dim)
    partial = torch.bmm(weights.to(values.dtype).view(*flat, block_size), values)
    partial = partial.view(num_tiles, num_blocks, kv_heads, num_rows, head_dim)
    partial_sums = weights.sum(dim=4)
    total, norm = partial[:, 0].float(), partial_sums[:, 0].clone()
    for block in range(1, num_blocks):
        total = total + partial[:, block]
        norm += partial_sums[:, block]
    result = (total / norm.unsqueeze(-1)).to(query.dtype)
    result = result[:, :, : group.rows.shape[1] * group_size].view(num_tiles, kv_heads, -1, group_size, head_dim)
    result = result.transpose(1, 2).reshape(num_tiles, -1, num_heads, head_dim)
    out[group.out_row] = result[group.out_tile, group.out_pos]

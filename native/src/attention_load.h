// Tiles of keys and values out of their blocks: in place where they lie as the kernels read them, else as a copy.
#pragma once

#include "attention_tile.h"

namespace headstart {
namespace HS_ISA {

// What one request and one KV head read.
struct KvView {
  const KvLayout& layout;
  const uint8_t* head_base;  // this head of block 0
  const int64_t* block_table;
  size_t block_bytes, values_at, scales_at;

  KvView(const KvLayout& kv, const uint8_t* layer, int head, const int64_t* table)
      : layout(kv), head_base(layer + kv.head_at(0, head)), block_table(table), block_bytes(kv.block_bytes()),
        values_at(kv.values_at()), scales_at(kv.scales_at()) {}

  const uint8_t* block(int key) const { return head_base + size_t(block_table[key / layout.block_size]) * block_bytes; }
  size_t offset(int key) const { return size_t(key % layout.block_size); }
};

// A thread's room for a tile that must be copied.
struct TileRoom {
  float* keys;    // [4 groups][head_dim][16]
  float* values;  // [64][padded_dim]
  float* scales;  // [64] of keys, [64] of values
  uint8_t* raw;   // elements of 16 keys, [head_dim][16], and of 16 values, [16][padded_dim]
};

// 16 keys lie side by side in a block.
HS_INLINE bool has_whole_groups(const KvLayout& layout) { return layout.block_size % kPanel == 0; }

// Keys far apart fill only some sets of the cache, and every group of rows would widen what is no float: for many rows
// they are better copied.
HS_INLINE bool reads_in_place(const KvLayout& layout, int num_rows) {
  return has_whole_groups(layout) &&
         (num_rows <= kMaxRows || (layout.format == KvFormat::kFloat32 && layout.block_size <= 64));
}

static void point_to_tile(const KvView& view, int first_key, Tile& tile) {
  const size_t bytes = element_bytes(view.layout.format);
  tile.format = view.layout.format;
  tile.key_stride = size_t(view.layout.block_size);
  for (int group = 0; group < tile.num_groups; group++) {
    const int key = first_key + group * kPanel;
    const uint8_t* block = view.block(key);
    const size_t offset = view.offset(key);
    tile.keys[group] = block + offset * bytes;
    tile.values[group] = block + view.values_at + offset * size_t(view.layout.padded_dim()) * bytes;
  }
}

// -- copies -----------------------------------------------------------------------------------------------------------

template <KvFormat FORMAT>
static void expand_group(const KvLayout& layout, const uint8_t* keys, size_t key_stride, const uint8_t* values,
                         float* keys_out, float* values_out) {
  for (int d = 0; d < layout.head_dim; d++) {
    HS_UNROLL for (int i = 0; i < kPanel; i += kLanes) {
      store(keys_out + d * kPanel + i, load_elements<FORMAT>(keys, size_t(d) * key_stride + size_t(i)));
    }
  }
  const size_t count = size_t(kPanel) * size_t(layout.padded_dim());
  for (size_t i = 0; i < count; i += kLanes) store(values_out + i, load_elements<FORMAT>(values, i));
}

// Where 16 keys are not neighbours: the elements of those that exist, one by one, zeros for the rest.
template <size_t BYTES>
static void gather_group(const KvView& view, int first_key, int num_keys, uint8_t* keys_out, uint8_t* values_out) {
  const size_t dim = size_t(view.layout.head_dim), size = size_t(view.layout.block_size);
  const size_t row_bytes = size_t(view.layout.padded_dim()) * BYTES;
  std::memset(keys_out, 0, dim * kPanel * BYTES);
  std::memset(values_out, 0, kPanel * row_bytes);
  for (int i = 0; i < num_keys; i++) {
    const uint8_t* block = view.block(first_key + i);
    const size_t offset = view.offset(first_key + i);
    for (size_t d = 0; d < dim; d++) {
      std::memcpy(keys_out + (d * kPanel + size_t(i)) * BYTES, block + (d * size + offset) * BYTES, BYTES);
    }
    std::memcpy(values_out + size_t(i) * row_bytes, block + view.values_at + offset * row_bytes, row_bytes);
  }
}

template <KvFormat FORMAT>
static void copy_group(const KvView& view, int first_key, int num_keys, const TileRoom& room, float* keys_out,
                       float* values_out) {
  constexpr size_t kBytes = element_bytes(FORMAT);
  const KvLayout& layout = view.layout;
  if (has_whole_groups(layout)) {
    const uint8_t* block = view.block(first_key);
    const size_t offset = view.offset(first_key);
    const uint8_t* values = block + view.values_at + offset * size_t(layout.padded_dim()) * kBytes;
    expand_group<FORMAT>(layout, block + offset * kBytes, size_t(layout.block_size), values, keys_out, values_out);
  } else {
    uint8_t* values = room.raw + size_t(layout.head_dim) * kPanel * kBytes;
    gather_group<kBytes>(view, first_key, num_keys, room.raw, values);
    expand_group<FORMAT>(layout, room.raw, kPanel, values, keys_out, values_out);
  }
}

// The scales of 16 keys and values, zero where there is no key.
static void copy_scales(const KvView& view, int first_key, int num_keys, float* key_scales, float* value_scales) {
  const size_t size = size_t(view.layout.block_size);
  const int run = has_whole_groups(view.layout) ? kPanel : 1;
  for (int i = 0; i < num_keys; i += run) {
    const float* scales = reinterpret_cast<const float*>(view.block(first_key + i) + view.scales_at);
    const size_t offset = view.offset(first_key + i);
    std::memcpy(key_scales + i, scales + offset, size_t(run) * sizeof(float));
    std::memcpy(value_scales + i, scales + size + offset, size_t(run) * sizeof(float));
  }
  if (run > 1) return;
  std::memset(key_scales + num_keys, 0, size_t(kPanel - num_keys) * sizeof(float));
  std::memset(value_scales + num_keys, 0, size_t(kPanel - num_keys) * sizeof(float));
}

template <KvFormat FORMAT>
static void copy_tile(const KvView& view, int first_key, int num_keys, const TileRoom& room, Tile& tile) {
  const size_t key_floats = size_t(kPanel) * size_t(view.layout.head_dim);
  const size_t value_floats = size_t(kPanel) * size_t(view.layout.padded_dim());
  tile.format = KvFormat::kFloat32;
  tile.key_stride = kPanel;
  for (int group = 0; group < tile.num_groups; group++) {
    const int at = group * kPanel, count = std::min(kPanel, num_keys - at);
    float* keys = room.keys + size_t(group) * key_floats;
    float* values = room.values + size_t(group) * value_floats;
    copy_group<FORMAT>(view, first_key + at, count, room, keys, values);
    tile.keys[group] = reinterpret_cast<const uint8_t*>(keys);
    tile.values[group] = reinterpret_cast<const uint8_t*>(values);
  }
}

// The tile that begins at `first_key`, a multiple of 64; num_keys of it (at most 64) are seen by some row.
static Tile load_tile(const KvView& view, int first_key, int num_keys, int num_rows, const TileRoom& room) {
  Tile tile{};
  tile.num_groups = (num_keys + kPanel - 1) / kPanel;
  if (is_scaled(view.layout.format)) {
    for (int at = 0; at < num_keys; at += kPanel) {
      copy_scales(view, first_key + at, std::min(kPanel, num_keys - at), room.scales + at, room.scales + kTileKeys + at);
    }
    tile.key_scales = room.scales;
    tile.value_scales = room.scales + kTileKeys;
  }
  if (reads_in_place(view.layout, num_rows)) {
    point_to_tile(view, first_key, tile);
    return tile;
  }
  switch (view.layout.format) {
    case KvFormat::kFloat32: copy_tile<KvFormat::kFloat32>(view, first_key, num_keys, room, tile); break;
    case KvFormat::kFloat16: copy_tile<KvFormat::kFloat16>(view, first_key, num_keys, room, tile); break;
    case KvFormat::kBfloat16: copy_tile<KvFormat::kBfloat16>(view, first_key, num_keys, room, tile); break;
    case KvFormat::kInt8: copy_tile<KvFormat::kInt8>(view, first_key, num_keys, room, tile); break;
    case KvFormat::kFp8: copy_tile<KvFormat::kFp8>(view, first_key, num_keys, room, tile); break;
  }
  return tile;
}

}  // namespace HS_ISA
}  // namespace headstart

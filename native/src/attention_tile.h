// Attention of some query rows to one tile of 64 keys: scores, softmax, weighted values.
//
// The order of every sum is fixed: scores over the columns, weighted values over the keys, one after the other in one
// accumulator each, whatever the number of rows in a micro-kernel. A row's result depends on its query and keys alone.
#pragma once

#include <cfloat>
#include <type_traits>

#include "kv.h"
#include "simd.h"

namespace headstart {
namespace HS_ISA {

#define HS_UNROLL_SOME _Pragma("GCC unroll 8")

constexpr int kTileKeys = 64;
constexpr int kTileGroups = kTileKeys / kPanel;
// A row's reference exponent follows its maximum only when that has grown by more: weights up to 2^8 do no harm.
constexpr float kMaxGrowth = 8.f;
constexpr float kNothingSeen = -FLT_MAX;

// Keys and values of a tile in groups of 16 keys, elements of `format`.
struct Tile {
  int num_groups;                      // those that hold a key that some row sees
  KvFormat format;
  const uint8_t* keys[kTileGroups];    // [head_dim], key_stride elements apart, 16 keys side by side
  const uint8_t* values[kTileGroups];  // [16][padded_dim]
  size_t key_stride;
  const float* key_scales;             // [64], or null
  const float* value_scales;
};

// Softmax so far: sum(weight * value) [rows][padded_dim], sum(weight) in lanes, the exponent that weights refer to.
struct Partial {
  float* sums;
  float* weight_lanes;  // [rows][kLanes]
  float* exponents;     // [rows]
};

// Query rows of one KV head: consecutive queries, `heads_per_query` rows each.
struct Rows {
  const float* queries;  // [count][padded_dim]
  int count, heads_per_query;
  int first_position;    // of the first query
  int head_dim, padded_dim;

  int position(int row) const { return first_position + row / heads_per_query; }
  // The first row that sees this key.
  int first_seeing(int key) const { return std::max(0, key - first_position) * heads_per_query; }
};

template <KvFormat FORMAT>
using FormatIs = std::integral_constant<KvFormat, FORMAT>;

// Calls f with the largest possible number of rows as a type, again and again.
template <int ROWS, class F>
HS_INLINE void with_rows(int rows, F&& f) {
  if (rows == ROWS) {
    f(std::integral_constant<int, ROWS>());
  } else if constexpr (ROWS > 1) {
    with_rows<ROWS - 1>(rows, f);
  }
}

template <class F>
HS_INLINE void for_row_groups(int first, int end, F&& f) {
  int row = first;
  for (; row + kMaxRows <= end; row += kMaxRows) f(std::integral_constant<int, kMaxRows>(), row);
  with_rows<kMaxRows - 1>(end - row, [&](auto rows) { f(rows, row); });
}

// -- micro-kernels ----------------------------------------------------------------------------------------------------

template <KvFormat FORMAT>
HS_INLINE VF load_elements(const uint8_t* base, size_t index) {
  const uint8_t* at = base + index * element_bytes(FORMAT);
  if constexpr (FORMAT == KvFormat::kFloat32) return load(reinterpret_cast<const float*>(at));
  if constexpr (FORMAT == KvFormat::kFloat16) return load_half(reinterpret_cast<const uint16_t*>(at));
  if constexpr (FORMAT == KvFormat::kBfloat16) return load_bfloat(reinterpret_cast<const uint16_t*>(at));
  if constexpr (FORMAT == KvFormat::kInt8) return load_int8(reinterpret_cast<const int8_t*>(at));
  if constexpr (FORMAT == KvFormat::kFp8) return load_fp8(at);
}

// Groups of keys, or panels of columns, that a micro-kernel takes at once: two where a vector holds a whole one.
constexpr int kSideBySide = kPanelVecs == 1 ? 2 : 1;

// scores[ROWS][64], 16 * GROUPS of them = queries . keys
template <KvFormat FORMAT, int ROWS, int GROUPS>
static __attribute__((noinline)) void score(const float* queries, size_t query_stride, const uint8_t* const* keys,
                                            size_t key_stride, int head_dim, float* scores) {
  VF sums[GROUPS][ROWS][kPanelVecs];
  const uint8_t* from[GROUPS];
  HS_UNROLL for (int g = 0; g < GROUPS; g++) {
    from[g] = keys[g];
    HS_UNROLL for (int r = 0; r < ROWS; r++) {
      HS_UNROLL for (int v = 0; v < kPanelVecs; v++) sums[g][r][v] = zero();
    }
  }
  HS_UNROLL_SOME for (int d = 0; d < head_dim; d++) {
    VF key[GROUPS][kPanelVecs];
    HS_UNROLL for (int g = 0; g < GROUPS; g++) {
      HS_UNROLL for (int v = 0; v < kPanelVecs; v++) {
        key[g][v] = load_elements<FORMAT>(from[g], size_t(v) * kLanes);
        HS_KEEP(key[g][v]);
      }
      from[g] += key_stride * element_bytes(FORMAT);
    }
    HS_UNROLL for (int r = 0; r < ROWS; r++) {
      const VF query = set1(queries[size_t(r) * query_stride + size_t(d)]);
      HS_UNROLL for (int g = 0; g < GROUPS; g++) {
        HS_UNROLL for (int v = 0; v < kPanelVecs; v++) sums[g][r][v] = fma(query, key[g][v], sums[g][r][v]);
      }
    }
  }
  HS_UNROLL for (int g = 0; g < GROUPS; g++) {
    HS_UNROLL for (int r = 0; r < ROWS; r++) {
      HS_UNROLL for (int v = 0; v < kPanelVecs; v++) {
        store(scores + r * kTileKeys + g * kPanel + v * kLanes, sums[g][r][v]);
      }
    }
  }
}

// sums[ROWS][16 * PANELS columns] += weights[ROWS][64] . values
template <KvFormat FORMAT, int ROWS, int PANELS>
static __attribute__((noinline)) void add_values(const float* weights, const uint8_t* const* values, int num_groups,
                                                 size_t column, size_t padded_dim, float* out) {
  constexpr int kVecs = PANELS * kPanelVecs;
  VF sums[ROWS][kVecs];
  HS_UNROLL for (int r = 0; r < ROWS; r++) {
    HS_UNROLL for (int v = 0; v < kVecs; v++) sums[r][v] = load(out + size_t(r) * padded_dim + v * kLanes);
  }
  for (int group = 0; group < num_groups; group++) {
    const uint8_t* from = values[group] + column * element_bytes(FORMAT);
    HS_UNROLL_SOME for (int key = 0; key < kPanel; key++) {
      VF value[kVecs];
      HS_UNROLL for (int v = 0; v < kVecs; v++) {
        value[v] = load_elements<FORMAT>(from, size_t(v) * kLanes);
        HS_KEEP(value[v]);
      }
      from += padded_dim * element_bytes(FORMAT);
      HS_UNROLL for (int r = 0; r < ROWS; r++) {
        const VF weight = set1(weights[r * kTileKeys + key]);
        HS_UNROLL for (int v = 0; v < kVecs; v++) sums[r][v] = fma(weight, value[v], sums[r][v]);
      }
    }
    weights += kPanel;
  }
  HS_UNROLL for (int r = 0; r < ROWS; r++) {
    HS_UNROLL for (int v = 0; v < kVecs; v++) store(out + size_t(r) * padded_dim + v * kLanes, sums[r][v]);
  }
}

// -- softmax ----------------------------------------------------------------------------------------------------------

HS_INLINE void scale_row(float* x, int count, float factor) {
  for (int i = 0; i < count; i += kLanes) store(x + i, mul(load(x + i), set1(factor)));
}

HS_INLINE float power_of_two(float exponent) {
  float lanes[kLanes];
  store(lanes, exp2_approx(set1(exponent)));
  return lanes[0];
}

// Makes a row's weights refer to its tile's maximum, and what was summed before as well, if that is worth it.
HS_INLINE void raise_exponent(const Partial& partial, int row, int padded_dim, float most) {
  const float before = partial.exponents[row];
  if (!(most > before + kMaxGrowth)) return;
  partial.exponents[row] = most;
  if (before != kNothingSeen) {
    const float factor = power_of_two(before - most);
    scale_row(partial.sums + size_t(row) * size_t(padded_dim), padded_dim, factor);
    scale_row(partial.weight_lanes + size_t(row) * kLanes, kLanes, factor);
  }
}

// First pass over a row's scores: the exponent follows the maximum. Keys from `visible` on are hidden, but ALL are seen
// nearly always.
template <bool SCALED, bool ALL>
HS_INLINE void find_exponent(float* scores, int visible, const Tile& tile, const Partial& partial, int row,
                             int padded_dim) {
  const int end = ALL ? kTileKeys : (visible + kLanes - 1) / kLanes * kLanes;
  if constexpr (SCALED) {
    for (int i = 0; i < end; i += kLanes) store(scores + i, mul(load(scores + i), load(tile.key_scales + i)));
  }
  if constexpr (!ALL) std::fill(scores + visible, scores + end, kNothingSeen);
  VF most = load(scores);
  for (int i = kLanes; i < end; i += kLanes) most = vmax(most, load(scores + i));
  raise_exponent(partial, row, padded_dim, hmax(most));
}

// Second pass: scores become weights; hidden keys get zero.
template <bool SCALED, bool ALL>
HS_INLINE void weigh_row(float* scores, int visible, const Tile& tile, const Partial& partial, int row) {
  const VF exponent = set1(partial.exponents[row]);
  float* lanes = partial.weight_lanes + size_t(row) * kLanes;
  VF sum = load(lanes);
  int i = 0;
  for (; i < (ALL ? kTileKeys : visible); i += kLanes) {
    VF weight = exp2_approx(sub(load(scores + i), exponent));
    if (!ALL && i + kLanes > visible) weight = first_lanes(weight, visible - i);
    sum = add(sum, weight);
    if constexpr (SCALED) weight = mul(weight, load(tile.value_scales + i));
    store(scores + i, weight);
  }
  store(lanes, sum);
  if constexpr (ALL) return;
  for (; i < tile.num_groups * kPanel; i += kLanes) store(scores + i, zero());
}

// -- one tile ---------------------------------------------------------------------------------------------------------

HS_INLINE int visible_keys(const Rows& rows, int row, int first_key) {
  return std::min(kTileKeys, rows.position(row) - first_key + 1);
}

// Of the tile, up to the last one that row sees.
HS_INLINE int visible_groups(const Rows& rows, int row, int first_key) {
  return (visible_keys(rows, row, first_key) + kPanel - 1) / kPanel;
}

template <bool SCALED, int ROWS>
HS_INLINE void weigh_rows(const Rows& rows, int first_row, const Tile& tile, int first_key, float* scores,
                          const Partial& partial) {
  const bool all = visible_keys(rows, first_row, first_key) == kTileKeys;
  for (int i = 0; i < ROWS; i++) {
    const int row = first_row + i, visible = visible_keys(rows, row, first_key);
    float* at = scores + i * kTileKeys;
    if (all) {
      find_exponent<SCALED, true>(at, kTileKeys, tile, partial, row, rows.padded_dim);
    } else {
      find_exponent<SCALED, false>(at, visible, tile, partial, row, rows.padded_dim);
    }
  }
  for (int i = 0; i < ROWS; i++) {
    const int row = first_row + i, visible = visible_keys(rows, row, first_key);
    float* at = scores + i * kTileKeys;
    if (all) {
      weigh_row<SCALED, true>(at, kTileKeys, tile, partial, row);
    } else {
      weigh_row<SCALED, false>(at, visible, tile, partial, row);
    }
  }
}

// Scores of all rows that see something of the tile, and the weights that become of them.
template <KvFormat FORMAT, bool SCALED>
static void weigh_tile(const Rows& rows, const Tile& tile, int first_key, float* scores, const Partial& partial) {
  const size_t stride = size_t(rows.padded_dim);
  for_row_groups(rows.first_seeing(first_key), rows.count, [&](auto count, int row) {
    constexpr int kRows = decltype(count)::value;
    const int groups = visible_groups(rows, row + kRows - 1, first_key);
    const float* queries = rows.queries + size_t(row) * stride;
    float* row_scores = scores + row * kTileKeys;
    const auto score_groups = [&](auto side_by_side, int group) {
      score<FORMAT, kRows, decltype(side_by_side)::value>(queries, stride, tile.keys + group, tile.key_stride,
                                                          rows.head_dim, row_scores + group * kPanel);
    };
    int group = 0;
    for (; group + kSideBySide <= groups; group += kSideBySide) {
      score_groups(std::integral_constant<int, kSideBySide>(), group);
    }
    if (group < groups) score_groups(std::integral_constant<int, 1>(), group);
    weigh_rows<SCALED, kRows>(rows, row, tile, first_key, row_scores, partial);
  });
}

template <KvFormat FORMAT>
static void add_tile(const Rows& rows, const Tile& tile, int first_key, const float* weights, float* sums) {
  const size_t stride = size_t(rows.padded_dim);
  for_row_groups(rows.first_seeing(first_key), rows.count, [&](auto count, int row) {
    constexpr int kRows = decltype(count)::value;
    const int groups = visible_groups(rows, row + kRows - 1, first_key);
    const auto add_panels = [&](auto side_by_side, size_t column) {
      add_values<FORMAT, kRows, decltype(side_by_side)::value>(weights + row * kTileKeys, tile.values, groups, column,
                                                               stride, sums + size_t(row) * stride + column);
    };
    size_t column = 0;
    for (; column + kSideBySide * kPanel <= stride; column += kSideBySide * kPanel) {
      add_panels(std::integral_constant<int, kSideBySide>(), column);
    }
    if (column < stride) add_panels(std::integral_constant<int, 1>(), column);
  });
}

// Adds a tile's keys to what the rows have seen. `scores` has room for [rows][64].
static void attend_tile(const Rows& rows, const Tile& tile, int first_key, float* scores, const Partial& partial) {
  const auto attend = [&](auto format, auto scaled) {
    constexpr KvFormat kFormat = decltype(format)::value;
    weigh_tile<kFormat, decltype(scaled)::value>(rows, tile, first_key, scores, partial);
    add_tile<kFormat>(rows, tile, first_key, scores, partial.sums);
  };
  switch (tile.format) {
    case KvFormat::kFloat32:
      if (tile.key_scales != nullptr) return attend(FormatIs<KvFormat::kFloat32>(), std::true_type());
      return attend(FormatIs<KvFormat::kFloat32>(), std::false_type());
    case KvFormat::kFloat16: return attend(FormatIs<KvFormat::kFloat16>(), std::false_type());
    case KvFormat::kBfloat16: return attend(FormatIs<KvFormat::kBfloat16>(), std::false_type());
    case KvFormat::kInt8: return attend(FormatIs<KvFormat::kInt8>(), std::true_type());
    case KvFormat::kFp8: return attend(FormatIs<KvFormat::kFp8>(), std::true_type());
  }
}

}  // namespace HS_ISA
}  // namespace headstart

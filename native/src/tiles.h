// Products of grouped formats on the matrix unit of AMX: 16 rows x 16 outputs x one group of 32 columns an instruction.
//
// The sums of a group are whole numbers, so exact, and are scaled in the order of multiply_codes: a row's result is the
// same to the bit, whichever of the two computes it.
//
// Intel's manual (Optimization Reference, "Intel AMX") has the layout: the left matrix holds rows of bytes, the right one
// four neighbours of a column side by side, as a panel's steps do. Tiles 0..3 take sums, 4 and 6 rows, 5 and 7 panels.
#pragma once

#include "activations.h"

#if defined(HS_AMX)

namespace headstart {
namespace HS_ISA {

constexpr int kTilesFrom = 7;  // rows from which a whole tile is cheaper than vectors

// Tiles that so many rows are worth; what is left over is for vectors.
HS_INLINE int num_tiles(int rows) { return rows / kTileRows + (rows % kTileRows >= kTilesFrom ? 1 : 0); }

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 32, 64, 32, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 8, 16, 8};
};

// The tiles of this thread, for as long as it lives. Written in assembly: GCC before 14 takes most of a configuration for
// unread, and drops what is written to it.
class Tiles {
 public:
  Tiles() {
    static const TileConfig config;
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// A panel for the matrix unit: for each group 16 scales and, for Q4_1, 16 minimums as floats, then 8 steps of codes with
// their sign. Without a zero point the codes' sum is what is wanted.
HS_INLINE size_t tile_group_bytes(Format format) { return format == Format::kQ4_1 ? 640 : 576; }

static inline void expand_for_tiles(const Weight& weight, const uint8_t* panel, uint8_t* out) {
  const size_t header = group_header_bytes(weight.format);
  const VI zero_points = _mm512_set1_epi8(char(zero_point(weight.format)));
  for (int g = 0; g < weight.num_groups(); g++, panel += group_bytes(weight.format)) {
    for (size_t i = 0; i < header; i += 32, out += 64) {
      store(reinterpret_cast<float*>(out), load_half(reinterpret_cast<const uint16_t*>(panel + i)));
    }
    for (int step = 0; step < kGroup / 4; step++, out += 64) {
      VI codes[kPanelVecs];
      if (is_nibbles(weight.format)) {
        load_nibble_panel(panel + header + step * 32, codes);
      } else {
        codes[0] = iload(panel + header + step * 64);
      }
      istore(out, _mm512_sub_epi8(codes[0], zero_points));
    }
  }
}

// What quantize_row left, tile by tile. Zeros for rows that do not exist.
static inline void gather_tiles(const Activations& a, int rows) {
  const int tiles = num_tiles(rows);
  if (tiles == 0) return;
  std::memset(a.tiles, 0, size_t(tiles) * size_t(a.groups) * kTileGroupBytes);
  for (int r = 0; r < std::min(rows, tiles * kTileRows); r++) {
    const Activations row = a.from_row(r);
    uint8_t* to = a.tiles + size_t(r / kTileRows) * size_t(a.groups) * kTileGroupBytes;
    const int in_tile = r % kTileRows;
    for (int g = 0; g < a.groups; g++, to += kTileGroupBytes) {
      std::memcpy(to + in_tile * kGroup, row.codes + g * kGroup, kGroup);
      std::memcpy(to + kTileScalesAt + in_tile * 4, row.scales + g, 4);
      std::memcpy(to + kTileZeroSumsAt + in_tile * 4, row.zero_sums + g, 4);
    }
  }
}

// Sums of 16 gathered rows with one expanded panel to out [16][16]. Products run two groups ahead of what scales them.
template <bool MINIMUM>
static __attribute__((noinline)) void multiply_tile_rows(const uint8_t* panel, const uint8_t* rows, int groups,
                                                         float* out) {
  constexpr size_t kHeader = MINIMUM ? 128 : 64, kBytes = kHeader + 512;
  alignas(64) int32_t sums[4][kTileRows * kPanel];
  VF totals[kTileRows];
  HS_UNROLL for (int r = 0; r < kTileRows; r++) totals[r] = zero();
  const auto scale = [&](int group, const int32_t* sum) __attribute__((always_inline)) {
    const float* header = reinterpret_cast<const float*>(panel + size_t(group) * kBytes);
    const uint8_t* factors = rows + size_t(group) * kTileGroupBytes;
    const float* scales = reinterpret_cast<const float*>(factors + kTileScalesAt);
    const float* weighted = reinterpret_cast<const float*>(factors + kTileZeroSumsAt);
    HS_UNROLL for (int r = 0; r < kTileRows; r++) {
      if constexpr (MINIMUM) totals[r] = fma(set1(weighted[r]), load(header + kPanel), totals[r]);
      const VF factor = mul(load(header), set1(scales[r]));
      totals[r] = fma(to_float(iload(sum + r * kPanel)), factor, totals[r]);
    }
  };
  // A macro, since the instructions' registers are part of their names.
#define HS_MULTIPLY_GROUP(group, SUMS, ROWS, CODES)                                     \
  do {                                                                                  \
    _tile_zero(SUMS);                                                                   \
    _tile_loadd(ROWS, rows + size_t(group) * kTileGroupBytes, kGroup);                       \
    _tile_loadd(CODES, panel + size_t(group) * kBytes + kHeader, 64);                   \
    _tile_dpbssd(SUMS, ROWS, CODES);                                                    \
    _tile_stored(SUMS, sums[SUMS], 64);                                                 \
  } while (false)
  HS_MULTIPLY_GROUP(0, 0, 4, 5);
  if (groups > 1) HS_MULTIPLY_GROUP(1, 1, 6, 7);
  int group = 0;
  for (; group + 6 <= groups; group += 4) {
    HS_MULTIPLY_GROUP(group + 2, 2, 4, 5);
    scale(group, sums[0]);
    HS_MULTIPLY_GROUP(group + 3, 3, 6, 7);
    scale(group + 1, sums[1]);
    HS_MULTIPLY_GROUP(group + 4, 0, 4, 5);
    scale(group + 2, sums[2]);
    HS_MULTIPLY_GROUP(group + 5, 1, 6, 7);
    scale(group + 3, sums[3]);
  }
  for (int last = group; last < groups; last++) {
    if (last < group + 2) {
      scale(last, sums[last - group]);
    } else {
      HS_MULTIPLY_GROUP(last, 2, 4, 5);
      scale(last, sums[2]);
    }
  }
#undef HS_MULTIPLY_GROUP
  HS_UNROLL for (int r = 0; r < kTileRows; r++) store(out + r * kPanel, totals[r]);
}

}  // namespace HS_ISA
}  // namespace headstart

#else

namespace headstart {
namespace HS_ISA {

HS_INLINE int num_tiles(int) { return 0; }
HS_INLINE void gather_tiles(const Activations&, int) {}

}  // namespace HS_ISA
}  // namespace headstart

#endif

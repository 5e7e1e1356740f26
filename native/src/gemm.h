// Products of a few rows of activations with panels of a packed weight.
//
// One output element is summed over K in one fixed order, whatever the number of rows in the micro-kernel, the block of
// rows, the thread: a row's result depends on that row alone.
#pragma once

#include "activations.h"
#include "tiles.h"

namespace headstart {
namespace HS_ISA {

// What happens to a product: it is stored, added to what is there, or becomes silu(gate) * up of two panels.
enum class Epilogue { kStore, kAdd, kGated };

struct Output {
  Epilogue epilogue;
  const float* bias;  // [outputs padded to whole panels], or null. kGated: as the panels lie, gate and up in turns
  float* data;
  size_t stride;
  int width;  // outputs that exist: the last panel may hold fewer than 16
};

// -- micro-kernels: ROWS rows x PANELS panels of 16 outputs, the sums to `out` [PANELS][ROWS][16] ---------------------

// Vectors of 16 lanes hold a whole panel: there several panels share each load of an activation.
template <int PANELS>
constexpr int kTogether = kPanelVecs == 1 ? PANELS : 1;

template <int ROWS, int PANELS>
static __attribute__((noinline)) void multiply_floats(const float* const* panels, const float* x, size_t stride,
                                                      int columns, float* out) {
  VF sums[PANELS][ROWS][kPanelVecs];
  HS_UNROLL for (int p = 0; p < PANELS; p++) {
    HS_UNROLL for (int r = 0; r < ROWS; r++) {
      HS_UNROLL for (int v = 0; v < kPanelVecs; v++) sums[p][r][v] = zero();
    }
  }
  const float* w[PANELS];
  HS_UNROLL for (int p = 0; p < PANELS; p++) w[p] = panels[p];
  for (int k = 0; k < columns; k++) {
    HS_UNROLL for (int first = 0; first < PANELS; first += kTogether<PANELS>) {
      VF weights[kTogether<PANELS>][kPanelVecs];
      HS_UNROLL for (int p = 0; p < kTogether<PANELS>; p++) {
        HS_UNROLL for (int v = 0; v < kPanelVecs; v++) weights[p][v] = load(w[first + p] + v * kLanes);
        w[first + p] += kPanel;
      }
      HS_UNROLL for (int r = 0; r < ROWS; r++) {
        const VF value = set1(x[size_t(r) * stride + size_t(k)]);
        HS_UNROLL for (int p = 0; p < kTogether<PANELS>; p++) {
          HS_UNROLL for (int v = 0; v < kPanelVecs; v++) {
            sums[first + p][r][v] = fma(value, weights[p][v], sums[first + p][r][v]);
          }
        }
      }
    }
  }
  HS_UNROLL for (int p = 0; p < PANELS; p++) {
    HS_UNROLL for (int r = 0; r < ROWS; r++) {
      HS_UNROLL for (int v = 0; v < kPanelVecs; v++) store(out + (p * ROWS + r) * kPanel + v * kLanes, sums[p][r][v]);
    }
  }
}

// How a grouped format's codes lie while they are multiplied. Nibbles are expanded to bytes once for many rows.
enum class Codes { kBytes, kNibbles, kExpandedNibbles };

template <Codes CODES>
HS_INLINE void load_step(const uint8_t* codes, int step, VI out[kPanelVecs]) {
  if constexpr (CODES == Codes::kNibbles) {
    load_nibble_panel(codes + step * 32, out);
  } else {
    HS_UNROLL for (int v = 0; v < kPanelVecs; v++) out[v] = iload(codes + step * 64 + v * 4 * kLanes);
  }
}

// Sums over a group's columns: of some panels, whose codes begin at `codes[p]`.
template <Codes CODES, int ROWS, int PANELS>
HS_INLINE void multiply_group(const uint8_t* const* codes, const int8_t* x, size_t stride,
                              VI sums[PANELS][ROWS][kPanelVecs]) {
  HS_UNROLL for (int p = 0; p < PANELS; p++) {
    HS_UNROLL for (int r = 0; r < ROWS; r++) {
      HS_UNROLL for (int v = 0; v < kPanelVecs; v++) sums[p][r][v] = izero();
    }
  }
  HS_UNROLL for (int step = 0; step < kGroup / 4; step++) {
    VI weights[PANELS][kPanelVecs];
    HS_UNROLL for (int p = 0; p < PANELS; p++) load_step<CODES>(codes[p], step, weights[p]);
    HS_UNROLL for (int r = 0; r < ROWS; r++) {
      const VI value = broadcast4(x + size_t(r) * stride + step * 4);
      HS_UNROLL for (int p = 0; p < PANELS; p++) {
        HS_UNROLL for (int v = 0; v < kPanelVecs; v++) {
          if constexpr (CODES == Codes::kBytes) {
            dot_bytes(sums[p][r][v], weights[p][v], value);
          } else {
            dot_nibbles(sums[p][r][v], weights[p][v], value);
          }
          HS_KEEP(sums[p][r][v]);
        }
      }
    }
  }
}

template <Codes CODES, bool MINIMUM, int ROWS, int PANELS>
static __attribute__((noinline)) void multiply_codes(const uint8_t* const* panels, const Activations& a, float* out) {
  constexpr size_t kHeader = MINIMUM ? 64 : 32;
  constexpr size_t kBytes = kHeader + (CODES == Codes::kNibbles ? 256 : 512);
  constexpr int kSide = kTogether<PANELS>;
  const int8_t* x = a.codes;
  const size_t groups = size_t(a.groups);
  VF totals[PANELS][ROWS][kPanelVecs];
  HS_UNROLL for (int p = 0; p < PANELS; p++) {
    HS_UNROLL for (int r = 0; r < ROWS; r++) {
      HS_UNROLL for (int v = 0; v < kPanelVecs; v++) totals[p][r][v] = zero();
    }
  }
  for (size_t g = 0; g < groups; g++, x += kGroup) {
    HS_UNROLL for (int first = 0; first < PANELS; first += kSide) {
      const uint8_t* codes[kSide];
      HS_UNROLL for (int p = 0; p < kSide; p++) codes[p] = panels[first + p] + g * kBytes + kHeader;
      VI sums[kSide][ROWS][kPanelVecs];
      multiply_group<CODES, ROWS, kSide>(codes, x, a.stride, sums);
      HS_UNROLL for (int p = 0; p < kSide; p++) {
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(codes[p] - kHeader);
        VF(&total)[ROWS][kPanelVecs] = totals[first + p];
        HS_UNROLL for (int r = 0; r < ROWS; r++) {
          const size_t at = size_t(r) * groups + g;
          const VF scale = set1(a.scales[at]);
          HS_UNROLL for (int v = 0; v < kPanelVecs; v++) {
            VI sum = CODES == Codes::kBytes ? sums[p][r][v] : finish_nibbles(sums[p][r][v]);
            if constexpr (MINIMUM) {
              float weighted;
              std::memcpy(&weighted, a.zero_sums + at, 4);
              total[r][v] = fma(set1(weighted), load_half(halves + kPanel + v * kLanes), total[r][v]);
            } else {
              sum = iadd(sum, iset1(a.zero_sums[at]));
            }
            const VF factor = mul(load_half(halves + v * kLanes), scale);
            total[r][v] = fma(to_float(sum), factor, total[r][v]);
          }
        }
      }
    }
  }
  HS_UNROLL for (int p = 0; p < PANELS; p++) {
    HS_UNROLL for (int r = 0; r < ROWS; r++) {
      HS_UNROLL for (int v = 0; v < kPanelVecs; v++) store(out + (p * ROWS + r) * kPanel + v * kLanes, totals[p][r][v]);
    }
  }
}

// -- from formats to kernels ------------------------------------------------------------------------------------------

template <int ROWS, int PANELS>
HS_INLINE void multiply(Format format, const uint8_t* const* panels, bool expanded, const Activations& a, int columns,
                        float* out) {
  switch (format) {
    case Format::kQ8_0: return multiply_codes<Codes::kBytes, false, ROWS, PANELS>(panels, a, out);
    case Format::kQ4_0:
      if (expanded) return multiply_codes<Codes::kExpandedNibbles, false, ROWS, PANELS>(panels, a, out);
      return multiply_codes<Codes::kNibbles, false, ROWS, PANELS>(panels, a, out);
    case Format::kQ4_1:
      if (expanded) return multiply_codes<Codes::kExpandedNibbles, true, ROWS, PANELS>(panels, a, out);
      return multiply_codes<Codes::kNibbles, true, ROWS, PANELS>(panels, a, out);
    default: {
      const float* floats[PANELS];
      for (int p = 0; p < PANELS; p++) floats[p] = reinterpret_cast<const float*>(panels[p]);
      return multiply_floats<ROWS, PANELS>(floats, a.floats, a.stride, columns, out);
    }
  }
}

// Calls `multiply` for a number of rows known only now, from 1 to MOST.
template <int MOST, int PANELS>
HS_INLINE void multiply_rows(int rows, Format format, const uint8_t* const* panels, bool expanded, const Activations& a,
                             int columns, float* out) {
  if constexpr (MOST > 1) {
    if (rows < MOST) return multiply_rows<MOST - 1, PANELS>(rows, format, panels, expanded, a, columns, out);
  }
  (void)rows;
  multiply<MOST, PANELS>(format, panels, expanded, a, columns, out);
}

static inline size_t expanded_bytes(const Weight& weight) {
  return is_grouped(weight.format) ? size_t(weight.num_groups()) * (group_header_bytes(weight.format) + 512)
                                   : size_t(weight.num_inputs) * 64;
}

// A panel as bytes instead of halves, or as floats: once for many rows.
static inline void expand_panel(const Weight& weight, const uint8_t* panel, uint8_t* out) {
  if (is_grouped(weight.format)) {
    const size_t header = group_header_bytes(weight.format);
    for (int g = 0; g < weight.num_groups(); g++) {
      std::memcpy(out, panel, header);
      panel += header;
      out += header;
      for (int step = 0; step < kGroup / 4; step++, panel += 32, out += 64) {
        VI codes[kPanelVecs];
        load_nibble_panel(panel, codes);
        HS_UNROLL for (int v = 0; v < kPanelVecs; v++) istore(out + v * 4 * kLanes, codes[v]);
      }
    }
    return;
  }
  float* floats = reinterpret_cast<float*>(out);
  if (weight.format == Format::kBfloat16) {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(panel);
    for (size_t i = 0; i < size_t(weight.num_inputs) * kPanel; i += kLanes) store(floats + i, load_bfloat(halves + i));
    return;
  }
  const float* scales = reinterpret_cast<const float*>(panel);
  const uint8_t* codes = panel + 64;
  for (int k = 0; k < weight.num_inputs; k++) {
    HS_UNROLL for (int v = 0; v < kPanelVecs; v++) {
      const size_t at = size_t(k) * kPanel + size_t(v) * kLanes;
      store(floats + at, mul(load_fp8(codes + at), load(scales + v * kLanes)));
    }
  }
}

// -- epilogues --------------------------------------------------------------------------------------------------------

HS_INLINE void finish_vector(const Output& out, float* target, VF value, int lanes) {
  if (lanes >= kLanes) {
    store(target, out.epilogue == Epilogue::kAdd ? add(value, load(target)) : value);
    return;
  }
  float values[kLanes];
  store(values, value);
  for (int i = 0; i < lanes; i++) target[i] = out.epilogue == Epilogue::kAdd ? values[i] + target[i] : values[i];
}

// One panel's sums `[rows][16]` to the outputs `panel * 16 ..`; kGated: two panels' sums to one.
static inline void finish_panel(const Output& out, const float* sums, const float* up_sums, int rows, int first_row,
                                int panel) {
  const bool gated = out.epilogue == Epilogue::kGated;
  const float* bias = out.bias == nullptr ? nullptr : out.bias + size_t(panel) * kPanel * (gated ? 2 : 1);
  for (int r = 0; r < rows; r++) {
    float* target = out.data + size_t(first_row + r) * out.stride + size_t(panel) * kPanel;
    for (int v = 0; v < kPanelVecs; v++) {
      VF value = load(sums + r * kPanel + v * kLanes);
      if (bias != nullptr) value = add(value, load(bias + v * kLanes));
      if (gated) {
        VF up = load(up_sums + r * kPanel + v * kLanes);
        if (bias != nullptr) up = add(up, load(bias + kPanel + v * kLanes));
        value = mul(silu(value), up);
      }
      finish_vector(out, target + v * kLanes, value, out.width - panel * kPanel - v * kLanes);
    }
  }
}

// -- many rows: panel after panel, each for all rows while it is in cache ---------------------------------------------

constexpr int kStreamedRows = 2;      // up to here several panels at once: memory streams count, not registers
constexpr int kManyStreams = 4;
constexpr int kExpandFrom = 12;  // rows from which expanding nibbles once pays

HS_INLINE bool needs_expansion(Format format) { return format == Format::kBfloat16 || format == Format::kFp8; }

// Panels of a micro-kernel for many rows: a pair where a vector holds a whole panel.
constexpr int kPanelsAtOnce = kPanelVecs == 1 ? 2 : 1;

template <int PANELS>
HS_INLINE void multiply_tile(const Weight& weight, const uint8_t* const* panels, bool expanded, const Activations& a,
                             int rows, float* out) {
  if (is_grouped(weight.format)) {
    multiply_rows<kMaxRowsInt, PANELS>(rows, weight.format, panels, expanded, a, weight.num_inputs, out);
  } else {
    multiply_rows<kMaxRows, PANELS>(rows, weight.format, panels, expanded, a, weight.num_inputs, out);
  }
}

HS_INLINE size_t padded_to_line(size_t bytes) { return (bytes + 63) / 64 * 64; }

#if defined(HS_AMX)
HS_INLINE size_t expanded_for_tiles_bytes(const Weight& weight) {
  return size_t(weight.num_groups()) * tile_group_bytes(weight.format);
}

// multiply_block for grouped formats on the matrix unit; what fills too little of a tile is left to vectors.
static inline void multiply_tiles(const Weight& weight, const Activations& a, int rows, int first, int last,
                                  const Output& out, uint8_t* scratch) {
  const bool gated = out.epilogue == Epilogue::kGated;
  const int per_output = gated ? 2 : 1, tiles = num_tiles(rows);
  const size_t panel_bytes = expanded_for_tiles_bytes(weight), tile_bytes = size_t(a.groups) * kTileGroupBytes;
  alignas(64) float sums[2][kTileRows * kPanel];
  const Tiles configured;
  for (int panel = first; panel < last; panel++) {
    const uint8_t* packed = weight.panel(panel * per_output);
    for (int i = 0; i < per_output; i++) {
      expand_for_tiles(weight, packed + size_t(i) * weight.panel_bytes(), scratch + size_t(i) * panel_bytes);
    }
    for (int row = 0, tile = 0; row < rows; row += kTileRows, tile++) {
      const int count = std::min(kTileRows, rows - row);
      for (int i = 0; i < per_output; i++) {
        if (tile == tiles) {
          const uint8_t* whole = packed + size_t(i) * weight.panel_bytes();
          multiply_tile<1>(weight, &whole, false, a.from_row(row), count, sums[i]);
        } else {
          const uint8_t *expanded = scratch + size_t(i) * panel_bytes, *tiled = a.tiles + size_t(tile) * tile_bytes;
          if (weight.format == Format::kQ4_1) {
            multiply_tile_rows<true>(expanded, tiled, a.groups, sums[i]);
          } else {
            multiply_tile_rows<false>(expanded, tiled, a.groups, sums[i]);
          }
        }
      }
      finish_panel(out, sums[0], sums[1], count, row, panel);
    }
  }
}
#endif

// Bytes of `scratch` below.
HS_INLINE size_t scratch_bytes(const Weight& weight) {
#if defined(HS_AMX)
  if (is_grouped(weight.format)) return 2 * expanded_for_tiles_bytes(weight);
#endif
  return 2 * padded_to_line(expanded_bytes(weight));
}

// Output panels [first, last) of rows [0, rows); kGated counts pairs of panels.
static inline void multiply_block(const Weight& weight, const Activations& a, int rows, int first, int last,
                                  const Output& out, uint8_t* scratch) {
#if defined(HS_AMX)
  if (a.tiles != nullptr) return multiply_tiles(weight, a, rows, first, last, out, scratch);
#endif
  constexpr int kMost = kMaxRows > kMaxRowsInt ? kMaxRows : kMaxRowsInt;
  const bool gated = out.epilogue == Epilogue::kGated;
  const int most = is_grouped(weight.format) ? kMaxRowsInt : kMaxRows;
  const bool expand = needs_expansion(weight.format) || (is_nibbles(weight.format) && rows >= kExpandFrom);
  const size_t panel_bytes = weight.panel_bytes(), expanded = padded_to_line(expanded_bytes(weight));
  const int begin = gated ? 2 * first : first, end = gated ? 2 * last : last;
  alignas(64) float sums[2 * kMost * kPanel];
  for (int panel = begin; panel < end;) {
    const int count = gated ? 2 : std::min(kPanelsAtOnce, end - panel);
    const uint8_t* panels[2] = {nullptr, nullptr};
    for (int i = 0; i < count; i++) {
      panels[i] = weight.panel(panel + i);
      if (expand) {
        expand_panel(weight, panels[i], scratch + size_t(i) * expanded);
        panels[i] = scratch + size_t(i) * expanded;
      }
    }
    // The next panels are pulled towards the second-level cache, a slice with each tile of rows.
    const int following = std::min(count, end - panel - count);
    const char* next = reinterpret_cast<const char*>(weight.panel(panel + (following > 0 ? count : 0)));
    const size_t ahead = panel_bytes * size_t(following), slice = (ahead * size_t(most) / size_t(rows) + 63) / 64 * 64;
    size_t fetched = 0;
    for (int row = 0; row < rows; row += most) {
      const size_t until = std::min(ahead, fetched + slice);
      for (; fetched < until; fetched += 64) __builtin_prefetch(next + fetched, 0, 2);
      const int tile = std::min(most, rows - row);
      const Activations some = a.from_row(row);
      if (count == kPanelsAtOnce) {
        multiply_tile<kPanelsAtOnce>(weight, panels, expand, some, tile, sums);
      } else {
        for (int i = 0; i < count; i++) multiply_tile<1>(weight, panels + i, expand, some, tile, sums + i * tile * kPanel);
      }
      if (gated) {
        finish_panel(out, sums, sums + tile * kPanel, tile, row, panel / 2);
      } else {
        for (int i = 0; i < count; i++) finish_panel(out, sums + i * tile * kPanel, nullptr, tile, row, panel + i);
      }
    }
    panel += count;
  }
}

// STREAMS panels (pairs of them count as one output panel) of one or two rows, far from each other: panel `first + i` of
// each of the stretches.
template <int STREAMS>
static inline void multiply_streams(const Weight& weight, const Activations& a, int rows, int first, int stretch,
                                    const Output& out) {
  const int per_output = out.epilogue == Epilogue::kGated ? 2 : 1;
  const int outputs = STREAMS / per_output;
  alignas(64) float sums[STREAMS * kStreamedRows * kPanel];
  for (int i = 0; i < stretch; i++) {
    const uint8_t* panels[STREAMS];
    for (int j = 0; j < STREAMS; j++) {
      panels[j] = weight.panel((first + j / per_output * stretch + i) * per_output + j % per_output);
    }
    multiply_rows<kStreamedRows, STREAMS>(rows, weight.format, panels, false, a, weight.num_inputs, sums);
    for (int j = 0; j < outputs; j++) {
      const float* mine = sums + j * per_output * rows * kPanel;
      finish_panel(out, mine, mine + rows * kPanel, rows, 0, first + j * stretch + i);
    }
  }
}

// A row or two: several panels at once, so that as many streams of memory are under way.
static inline void multiply_few(const Weight& weight, const Activations& a, int rows, int first, int last,
                                const Output& out, uint8_t* scratch) {
  if (needs_expansion(weight.format)) return multiply_block(weight, a, rows, first, last, out, scratch);
  const int per_output = out.epilogue == Epilogue::kGated ? 2 : 1;
  const int stretch = (last - first) * per_output / kManyStreams;
  multiply_streams<kManyStreams>(weight, a, rows, first, stretch, out);
  first += stretch * kManyStreams / per_output;
  for (; first < last; first++) {
    if (per_output == 2) {
      multiply_streams<2>(weight, a, rows, first, 1, out);
    } else {
      multiply_streams<1>(weight, a, rows, first, 1, out);
    }
  }
}

}  // namespace HS_ISA
}  // namespace headstart

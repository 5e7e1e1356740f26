// Rows of activations in the form that a weight format multiplies: floats, or int8 codes in groups of 32.
//
// Quantized per row and group, so that a row's codes never depend on other rows. In every pair of neighbours the codes'
// absolute values sum to at most 128: then 255 * 128 fits 16 bits, and no product of the AVX2 kernels saturates.
#pragma once

#include "simd.h"
#include "threads.h"
#include "weight.h"

namespace headstart {
namespace HS_ISA {

constexpr int kTileRows = 16;
// One group of 16 rows for the matrix unit: [16][32] codes, 16 scales, 16 zero sums.
constexpr size_t kTileScalesAt = kTileRows * kGroup, kTileZeroSumsAt = kTileScalesAt + 64;
constexpr size_t kTileGroupBytes = kTileZeroSumsAt + 64;

// `zero_sums`: what a group adds beside code * code. Q8_0, Q4_0: int32, minus the zero point times the sum of the codes;
// Q4_1: float, the scale times that sum, to be multiplied by the minimum.
struct Activations {
  const float* floats = nullptr;  // [rows][stride], when the weight is not grouped
  int8_t* codes = nullptr;        // [rows][groups * 32]
  float* scales = nullptr;        // [rows][groups]
  int32_t* zero_sums = nullptr;   // [rows][groups]
  size_t stride = 0;              // elements between rows of floats or codes
  int groups = 0;
  uint8_t* tiles = nullptr;       // the codes once more, as the matrix unit reads them (tiles.h)

  Activations from_row(int row) const {
    Activations rest = *this;
    if (floats != nullptr) {
      rest.floats += size_t(row) * stride;
    } else {
      rest.codes += size_t(row) * stride;
      rest.scales += size_t(row) * size_t(groups);
      rest.zero_sums += size_t(row) * size_t(groups);
    }
    return rest;
  }
};

// Room for `rows` rows of codes and `num_tiles` tiles of them.
static inline Activations reserve_codes(Arena& arena, const Weight& weight, int rows, int num_tiles) {
  Activations a;
  a.groups = weight.num_groups();
  a.stride = size_t(a.groups) * kGroup;
  const size_t count = size_t(rows) * size_t(a.groups);
  const size_t tile_bytes = size_t(num_tiles) * size_t(a.groups) * kTileGroupBytes;
  uint8_t* memory = arena.reserve_for<uint8_t>(tile_bytes + count * (kGroup + 8) + 64);
  if (num_tiles > 0) a.tiles = memory;
  memory += tile_bytes;
  a.scales = reinterpret_cast<float*>(memory);
  a.zero_sums = reinterpret_cast<int32_t*>(memory + count * 4);
  a.codes = reinterpret_cast<int8_t*>(memory + count * 8);
  return a;
}

// One row of `columns` floats to codes. Columns up to the next group count as zero.
static inline void quantize_row(const float* x, int columns, Format format, const Activations& a, int row) {
  int8_t* codes = a.codes + size_t(row) * a.stride;
  float* scales = a.scales + size_t(row) * size_t(a.groups);
  int32_t* zero_sums = a.zero_sums + size_t(row) * size_t(a.groups);
  alignas(64) float padded[kGroup];
  for (int g = 0; g < a.groups; g++, codes += kGroup) {
    const float* from = x + g * kGroup;
    if (columns - g * kGroup < kGroup) {
      std::memset(padded, 0, sizeof padded);
      std::memcpy(padded, from, size_t(columns - g * kGroup) * 4);
      from = padded;
    }
    constexpr int kVecs = kGroup / kLanes;
    VF v[kVecs];
    VF most = zero();
    HS_UNROLL for (int i = 0; i < kVecs; i++) {
      v[i] = load(from + i * kLanes);
      most = vmax(most, vabs(v[i]));
    }
    const float limit = std::max(hmax(most) * (1 / 127.f), largest_pair(v) * (1 / 127.5f));
    // A denormal limit has no inverse; what is that small counts as zero. NaN fails the comparison too.
    const float inverse = limit > 1e-37f ? 1 / limit : 0.f;
    VI rounded[kVecs], sum = izero();
    HS_UNROLL for (int i = 0; i < kVecs; i++) {
      rounded[i] = to_int(mul(v[i], set1(inverse)));
      sum = iadd(sum, rounded[i]);
    }
    store_codes(codes, rounded);
    const int32_t total = ihsum(sum);
    // Infinities and NaN make the whole row's scale NaN: the result must not look finite.
    scales[g] = limit > 1e-37f ? limit : limit * 0.f;
    if (format == Format::kQ4_1) {
      const float weighted = scales[g] * float(total);
      std::memcpy(zero_sums + g, &weighted, 4);
    } else {
      zero_sums[g] = -zero_point(format) * total;
    }
  }
}

// out = x / sqrt(mean(x^2) + eps) * weight
static inline void norm_row(const float* x, const float* weight, int columns, float eps, float* out) {
  VF squares = zero();
  int k = 0;
  for (; k + kLanes <= columns; k += kLanes) {
    const VF v = load(x + k);
    squares = fma(v, v, squares);
  }
  float sum = hsum(squares);
  for (; k < columns; k++) sum += x[k] * x[k];
  float factor = 1 / std::sqrt(sum / float(columns) + eps);
  // One infinity would leave finite zeros beside it, which look sound: the whole row is spoiled, visibly.
  if (!std::isfinite(sum)) factor = float_of(0x7fc00000);
  for (k = 0; k + kLanes <= columns; k += kLanes) {
    store(out + k, mul(mul(load(x + k), set1(factor)), load(weight + k)));
  }
  for (; k < columns; k++) out[k] = x[k] * factor * weight[k];
}

}  // namespace HS_ISA
}  // namespace headstart

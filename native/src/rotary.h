// Rotary embedding, norms of heads, and the write of keys and values into their blocks.
//
// What is written is finite: masked and stale slots are multiplied by zero, and zero times infinity is not zero.
#pragma once

#include <cfloat>

#include "kv.h"
#include "simd.h"
#include "threads.h"

namespace headstart {
namespace HS_ISA {

constexpr int kRowsPerWrite = 16;

HS_INLINE uint8_t float_to_fp8(float value) {  // e4m3fn, rounds to nearest even; |value| is at most 448
  const uint32_t bits = bits_of(value), sign = bits >> 24 & 0x80, rest = bits & 0x7fffffff;
  if (rest < 0x3c800000) return uint8_t(sign | uint32_t(std::nearbyintf(float_of(rest) * 0x1p9f)));
  return uint8_t(sign | (((rest + 0x7ffff + (rest >> 20 & 1)) >> 20) - (120 << 3)));
}

// -- heads ------------------------------------------------------------------------------------------------------------

HS_INLINE void normalize_head(const float* x, const float* weight, float eps, int dim, float* out) {
  float sum = 0;
  for (int d = 0; d < dim; d++) sum += x[d] * x[d];
  const float factor = 1.f / std::sqrt(sum / float(dim) + eps);
  for (int d = 0; d < dim; d++) out[d] = x[d] * factor * weight[d];
}

HS_INLINE void rotate_head(const float* x, const float* cos, const float* sin, int dim, float* out) {
  const int half = dim / 2;
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const VF a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(out + i, sub(mul(a, c), mul(b, s)));
    store(out + half + i, add(mul(b, c), mul(a, s)));
  }
  for (; i < half; i++) {
    const float a = x[i], b = x[half + i];
    out[i] = a * cos[i] - b * sin[i];
    out[half + i] = b * cos[i] + a * sin[i];
  }
}

// `weight` (of the norm) may be null; `row` is where cos and sin are read.
HS_INLINE void prepare_head(const RotateArgs& args, int row, const float* x, const float* weight, float* out) {
  const int dim = args.head_dim;
  float normal[kMaxHeadDim];
  if (weight != nullptr) {
    normalize_head(x, weight, args.qk_norm_eps, dim, normal);
    x = normal;
  }
  if (args.cos == nullptr) {
    std::memcpy(out, x, size_t(dim) * sizeof(float));
  } else {
    const size_t at = size_t(row) * size_t(dim / 2);
    rotate_head(x, args.cos + at, args.sin + at, dim, out);
  }
}

// -- formats ----------------------------------------------------------------------------------------------------------

constexpr float largest(KvFormat format) {
  return format == KvFormat::kFloat16 ? 65504.f : format == KvFormat::kBfloat16 ? 0x1.fep127f : FLT_MAX;
}

HS_INLINE void make_finite(const float* x, float limit, int dim, float* out) {
  for (int d = 0; d < dim; d++) {
    float value = x[d] == x[d] ? x[d] : 0.f;
    value = value > -limit ? value : -limit;
    out[d] = value < limit ? value : limit;
  }
}

// Codes of a scaled format are up to `range`; what is too small for a normal scale becomes zero.
HS_INLINE float scale_to_codes(float* x, float range, int dim) {
  float most = 0;
  for (int d = 0; d < dim; d++) most = std::max(most, std::fabs(x[d]));
  const bool nothing = most < 1e-30f;
  const float inverse = nothing ? 0.f : range / most;
  for (int d = 0; d < dim; d++) x[d] = std::min(std::max(x[d] * inverse, -range), range);
  return nothing ? 0.f : most / range;
}

template <KvFormat FORMAT>
HS_INLINE void put_element(uint8_t* base, size_t index, float value) {
  if constexpr (FORMAT == KvFormat::kFloat32) {
    std::memcpy(base + index * 4, &value, 4);
  } else if constexpr (is_scaled(FORMAT)) {
    base[index] = FORMAT == KvFormat::kFp8 ? float_to_fp8(value) : uint8_t(int8_t(std::nearbyintf(value)));
  } else {
    const uint16_t half = FORMAT == KvFormat::kFloat16 ? float_to_half(value) : float_to_bfloat(value);
    std::memcpy(base + index * 2, &half, 2);
  }
}

// A vector of one token to `base`, its elements `stride` apart; its scale, if the format has one, to `scale`.
template <KvFormat FORMAT>
HS_INLINE void write_vector(const float* x, int dim, uint8_t* base, size_t stride, uint8_t* scale) {
  float finite[kMaxHeadDim];
  make_finite(x, largest(FORMAT), dim, finite);
  if constexpr (is_scaled(FORMAT)) {
    const float factor = scale_to_codes(finite, FORMAT == KvFormat::kFp8 ? 448.f : 127.f, dim);
    std::memcpy(scale, &factor, 4);
  }
  for (int d = 0; d < dim; d++) put_element<FORMAT>(base, size_t(d) * stride, finite[d]);
}

template <KvFormat FORMAT>
static void write_row(const KvLayout& layout, uint8_t* layer, const RotateArgs& args, int row) {
  const float* keys = args.qkv + size_t(row) * args.qkv_stride + size_t(args.num_heads) * size_t(args.head_dim);
  const float* values = keys + size_t(args.num_kv_heads) * size_t(args.head_dim);
  const int64_t block = args.slots[row] / layout.block_size;
  const size_t offset = size_t(args.slots[row] % layout.block_size), size = size_t(layout.block_size);
  const size_t row_elements = size_t(layout.padded_dim());
  float rotated[kMaxHeadDim];
  for (int head = 0; head < args.num_kv_heads; head++) {
    const size_t at = size_t(head) * size_t(args.head_dim);
    uint8_t* base = layer + layout.head_at(block, head);
    uint8_t* scales = base + layout.scales_at();
    prepare_head(args, row, keys + at, args.qk_norm_k, rotated);
    write_vector<FORMAT>(rotated, args.head_dim, base + offset * element_bytes(FORMAT), size, scales + offset * 4);
    uint8_t* value_row = base + layout.values_at() + offset * row_elements * element_bytes(FORMAT);
    write_vector<FORMAT>(values + at, args.head_dim, value_row, 1, scales + (size + offset) * 4);
  }
}

static void write_query_row(const KvLayout& layout, const RotateArgs& args, int row) {
  const size_t padded = size_t(layout.padded_dim()), dim = size_t(args.head_dim);
  for (int head = 0; head < args.num_heads; head++) {
    float* out = args.queries + (size_t(row) * size_t(args.num_heads) + size_t(head)) * padded;
    const float* x = args.qkv + size_t(row) * args.qkv_stride + size_t(head) * dim;
    prepare_head(args, row, x, args.qk_norm_q, out);
    for (size_t d = 0; d < dim; d++) out[d] *= args.query_scale;
    for (size_t d = dim; d < padded; d++) out[d] = 0;
  }
}

static void rotate_and_write(ThreadPool& pool, const KvLayout& layout, uint8_t* layer, const RotateArgs& args) {
  const auto write_kv = [&](int row) {
    switch (layout.format) {
      case KvFormat::kFloat32: return write_row<KvFormat::kFloat32>(layout, layer, args, row);
      case KvFormat::kFloat16: return write_row<KvFormat::kFloat16>(layout, layer, args, row);
      case KvFormat::kBfloat16: return write_row<KvFormat::kBfloat16>(layout, layer, args, row);
      case KvFormat::kInt8: return write_row<KvFormat::kInt8>(layout, layer, args, row);
      case KvFormat::kFp8: return write_row<KvFormat::kFp8>(layout, layer, args, row);
    }
  };
  pool.parallel((args.num_rows + kRowsPerWrite - 1) / kRowsPerWrite, [&](int item, int) {
    const int end = std::min(args.num_rows, (item + 1) * kRowsPerWrite);
    for (int row = item * kRowsPerWrite; row < end; row++) {
      write_query_row(layout, args, row);
      write_kv(row);
    }
  });
}

}  // namespace HS_ISA
}  // namespace headstart

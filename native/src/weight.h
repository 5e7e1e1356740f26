// A packed weight matrix: what every instruction set reads, made once at load. Owns the layout and nothing else.
//
// 16 outputs make a panel. Float32: [K][16] floats. Bfloat16: the same in 16 bits. Fp8 (e4m3fn): 16 float scales, then
// [K][16] codes. Grouped formats, for each group of 32 columns: 16 half-precision scales, for Q4_1 16 minimums, then 8
// steps of 4 columns, each [16 outputs][4 columns] codes without sign: bytes (Q8_0, 128 added) or halves of bytes, where
// byte i of 32 holds outputs 0..7 in its low half and 8..15 in its high half.
#pragma once

#include <cstddef>
#include <cstdint>

// Headers are compiled once for each instruction set: what is not inlined would be merged, with the newest one's code.
#define HS_ALWAYS_INLINE inline __attribute__((always_inline))

namespace headstart {

enum class Format : int { kFloat32 = 0, kBfloat16 = 1, kFp8 = 2, kQ8_0 = 3, kQ4_0 = 4, kQ4_1 = 5 };

constexpr int kPanelOutputs = 16;
constexpr int kGroup = 32;

constexpr bool is_grouped(Format format) { return format >= Format::kQ8_0; }
constexpr bool is_nibbles(Format format) { return format == Format::kQ4_0 || format == Format::kQ4_1; }
constexpr size_t group_header_bytes(Format format) { return format == Format::kQ4_1 ? 64 : 32; }
constexpr size_t group_code_bytes(Format format) { return is_nibbles(format) ? 256 : 512; }
constexpr size_t group_bytes(Format format) { return group_header_bytes(format) + group_code_bytes(format); }
// What was added to a code to make it unsigned.
constexpr int zero_point(Format format) { return format == Format::kQ8_0 ? 128 : format == Format::kQ4_0 ? 8 : 0; }

struct Weight {
  Format format = Format::kFloat32;
  int num_outputs = 0;
  int num_inputs = 0;
  uint8_t* data = nullptr;  // num_panels() * panel_bytes()

  HS_ALWAYS_INLINE int num_panels() const { return (num_outputs + kPanelOutputs - 1) / kPanelOutputs; }
  HS_ALWAYS_INLINE int num_groups() const { return (num_inputs + kGroup - 1) / kGroup; }
  HS_ALWAYS_INLINE size_t panel_bytes() const {
    const size_t columns = size_t(num_inputs);
    switch (format) {
      case Format::kFloat32: return columns * 64;
      case Format::kBfloat16: return columns * 32;
      case Format::kFp8: return 64 + columns * 16;
      default: return size_t(num_groups()) * group_bytes(format);
    }
  }
  HS_ALWAYS_INLINE const uint8_t* panel(int index) const { return data + size_t(index) * panel_bytes(); }
};

// Puts row `output` into its place. Quantized rows come in GGUF's order of codes (see ops/formats.py).
void pack_float_row(const Weight& weight, int output, const float* row);
void pack_bfloat_row(const Weight& weight, int output, const uint16_t* row);
void pack_fp8_row(const Weight& weight, int output, const uint8_t* codes, float scale);
void pack_group_row(const Weight& weight, int output, const uint8_t* codes, const uint16_t* scales,
                    const uint16_t* minimums);
// Row `output` as floats, each value rounded once.
void unpack_row(const Weight& weight, int output, float* row);

}  // namespace headstart

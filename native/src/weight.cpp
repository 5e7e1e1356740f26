#include "weight.h"

#include <cmath>
#include <cstring>

#include "numbers.h"

namespace headstart {

namespace {

uint8_t* place(const Weight& weight, int output) {
  return weight.data + size_t(output / kPanelOutputs) * weight.panel_bytes();
}

// Where the code of column `column` (of 32) of output `lane` (of 16) lies in a group's codes.
size_t code_offset(Format format, int lane, int column) {
  const size_t step = size_t(column / 4), within = size_t(column % 4);
  return is_nibbles(format) ? step * 32 + size_t(lane % 8) * 4 + within : step * 64 + size_t(lane) * 4 + within;
}

uint8_t unsigned_code(Format format, const uint8_t* codes, int column) {
  if (format == Format::kQ8_0) return uint8_t(codes[column] + 128);
  return column < 16 ? codes[column] & 15 : codes[column - 16] >> 4;
}

float fp8_to_float(uint8_t code) {  // e4m3fn: no infinities, 0x7f is NaN
  const float sign = code & 0x80 ? -1.f : 1.f;
  const int exponent = code >> 3 & 15, fraction = code & 7;
  if (exponent == 15 && fraction == 7) return float_of(0x7fc00000);
  return sign * (exponent == 0 ? std::ldexp(float(fraction), -9) : std::ldexp(float(8 + fraction), exponent - 10));
}

}  // namespace

void pack_float_row(const Weight& weight, int output, const float* row) {
  uint8_t* panel = place(weight, output);
  const size_t lane = size_t(output % kPanelOutputs);
  for (int k = 0; k < weight.num_inputs; k++) {
    if (weight.format == Format::kFloat32) {
      std::memcpy(panel + (size_t(k) * kPanelOutputs + lane) * 4, row + k, 4);
    } else {
      const uint16_t half = float_to_bfloat(row[k]);
      std::memcpy(panel + (size_t(k) * kPanelOutputs + lane) * 2, &half, 2);
    }
  }
}

void pack_bfloat_row(const Weight& weight, int output, const uint16_t* row) {
  uint8_t* panel = place(weight, output);
  const size_t lane = size_t(output % kPanelOutputs);
  for (int k = 0; k < weight.num_inputs; k++) std::memcpy(panel + (size_t(k) * kPanelOutputs + lane) * 2, row + k, 2);
}

void pack_fp8_row(const Weight& weight, int output, const uint8_t* codes, float scale) {
  uint8_t* panel = place(weight, output);
  const size_t lane = size_t(output % kPanelOutputs);
  std::memcpy(panel + lane * 4, &scale, 4);
  for (int k = 0; k < weight.num_inputs; k++) panel[64 + size_t(k) * kPanelOutputs + lane] = codes[k];
}

void pack_group_row(const Weight& weight, int output, const uint8_t* codes, const uint16_t* scales,
                    const uint16_t* minimums) {
  const Format format = weight.format;
  const int lane = output % kPanelOutputs;
  const size_t row_bytes = is_nibbles(format) ? kGroup / 2 : kGroup;
  uint8_t* group = place(weight, output);
  for (int g = 0; g < weight.num_groups(); g++, group += group_bytes(format), codes += row_bytes) {
    std::memcpy(group + lane * 2, scales + g, 2);
    if (format == Format::kQ4_1) std::memcpy(group + 32 + lane * 2, minimums + g, 2);
    uint8_t* target = group + group_header_bytes(format);
    for (int column = 0; column < kGroup; column++) {
      const uint8_t code = unsigned_code(format, codes, column);
      uint8_t& byte = target[code_offset(format, lane, column)];
      if (!is_nibbles(format)) {
        byte = code;
      } else {
        byte = lane < 8 ? uint8_t((byte & 0xf0) | code) : uint8_t((byte & 0x0f) | code << 4);
      }
    }
  }
}

void unpack_row(const Weight& weight, int output, float* row) {
  const Format format = weight.format;
  const int lane = output % kPanelOutputs;
  const uint8_t* panel = place(weight, output);
  if (!is_grouped(format)) {
    float scale = 1;
    if (format == Format::kFp8) std::memcpy(&scale, panel + lane * 4, 4);
    for (int k = 0; k < weight.num_inputs; k++) {
      const size_t index = size_t(k) * kPanelOutputs + size_t(lane);
      if (format == Format::kFloat32) {
        std::memcpy(row + k, panel + index * 4, 4);
      } else if (format == Format::kBfloat16) {
        uint16_t half;
        std::memcpy(&half, panel + index * 2, 2);
        row[k] = bfloat_to_float(half);
      } else {
        row[k] = fp8_to_float(panel[64 + index]) * scale;
      }
    }
    return;
  }
  for (int k = 0; k < weight.num_inputs; k++) {
    const uint8_t* group = panel + size_t(k / kGroup) * group_bytes(format);
    const uint8_t* codes = group + group_header_bytes(format);
    uint16_t scale, minimum = 0;
    std::memcpy(&scale, group + lane * 2, 2);
    if (format == Format::kQ4_1) std::memcpy(&minimum, group + 32 + lane * 2, 2);
    uint8_t code = codes[code_offset(format, lane, k % kGroup)];
    if (is_nibbles(format)) code = lane < 8 ? code & 15 : code >> 4;
    // The product of a code and a half-precision scale is exact in a float: one rounding, as in `dequantize`.
    row[k] = float(int(code) - zero_point(format)) * half_to_float(scale) + half_to_float(minimum);
  }
}

}  // namespace headstart

// Numbers of 16 bits, one at a time: the same on every machine. Rounds to nearest even.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace headstart {

static inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

static inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

static inline float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, rest = half & 0x7fff;
  if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  if (rest >= 0x0400) return float_of(sign | ((rest << 13) + 0x38000000));
  return std::copysign(float(rest) * 0x1p-24f, float_of(sign | 0x3f800000));
}

static inline uint16_t float_to_half(float value) {  // what does not fit becomes infinite
  const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (rest >= 0x477ff000) return uint16_t(sign | 0x7c00);
  if (rest < 0x38800000) return uint16_t(sign | uint32_t(std::nearbyintf(float_of(rest) * 0x1p24f)));
  return uint16_t(sign | ((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13));
}

static inline float bfloat_to_float(uint16_t half) { return float_of(uint32_t(half) << 16); }

static inline uint16_t float_to_bfloat(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace headstart

// Vectors of float and int32 for one instruction set. Every kernel source is compiled once per set, in a namespace of
// its own (HS_ISA); what a set cannot do is written here, and nowhere else.
//
//   VF  kLanes floats          VI  kLanes int32, or 4 * kLanes bytes
//
// A row's result never depends on which rows are computed beside it, on any set. Sets need not agree with each other to
// the bit: where there is no fused multiply-add (portable), products are rounded.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(HS_AMX)  // the vectors of AVX-512, and a matrix unit (tiles.h)
#define HS_AVX512
#endif
#if defined(HS_AVX512) || defined(HS_AVX2)
#include <immintrin.h>
#elif defined(HS_NEON)
#include <arm_neon.h>
#endif

#include "numbers.h"

#define HS_INLINE static inline __attribute__((always_inline))
// Registers hold what is summed only if the loops over them are unrolled; the portable set has too few to gain from it.
#if defined(HS_AVX512) || defined(HS_AVX2) || defined(HS_NEON)
#define HS_UNROLL _Pragma("GCC unroll 16")
#else
#define HS_UNROLL
#endif
// Pins a value in a register: GCC otherwise reassociates integer sums into trees and spills every product.
#if defined(HS_AVX512)
#define HS_KEEP(x) asm("" : "+v"(x))
#elif defined(HS_AVX2)
#define HS_KEEP(x) asm("" : "+x"(x))
#elif defined(HS_NEON)
#define HS_KEEP(x) asm("" : "+w"(x))
#else
#define HS_KEEP(x) (void)0
#endif

namespace headstart {
namespace HS_ISA {

// -- AVX-512 ----------------------------------------------------------------------------------------------------------
#if defined(HS_AVX512)

using VF = __m512;
using VI = __m512i;
constexpr int kLanes = 16;
constexpr int kMaxRows = 8;     // rows of a micro-kernel of 16 outputs
constexpr int kMaxRowsInt = 6;

HS_INLINE VF zero() { return _mm512_setzero_ps(); }
HS_INLINE VF set1(float x) { return _mm512_set1_ps(x); }
HS_INLINE VF load(const float* p) { return _mm512_loadu_ps(p); }
HS_INLINE void store(float* p, VF x) { _mm512_storeu_ps(p, x); }
HS_INLINE VF add(VF a, VF b) { return _mm512_add_ps(a, b); }
HS_INLINE VF sub(VF a, VF b) { return _mm512_sub_ps(a, b); }
HS_INLINE VF mul(VF a, VF b) { return _mm512_mul_ps(a, b); }
HS_INLINE VF div(VF a, VF b) { return _mm512_div_ps(a, b); }
HS_INLINE VF fma(VF a, VF b, VF c) { return _mm512_fmadd_ps(a, b, c); }
HS_INLINE VF vmax(VF a, VF b) { return _mm512_max_ps(a, b); }
HS_INLINE VF vmin(VF a, VF b) { return _mm512_min_ps(a, b); }
HS_INLINE VF vabs(VF a) { return _mm512_abs_ps(a); }
HS_INLINE VF round_even(VF a) { return _mm512_roundscale_ps(a, 0); }
HS_INLINE VI to_int(VF a) { return _mm512_cvtps_epi32(a); }
HS_INLINE VF to_float(VI a) { return _mm512_cvtepi32_ps(a); }
HS_INLINE VF first_lanes(VF a, int n) { return _mm512_maskz_mov_ps(__mmask16(n >= 16 ? 0xffff : (1u << n) - 1), a); }
HS_INLINE VF scale_by_power(VF p, VF r) { return _mm512_scalef_ps(p, r); }
HS_INLINE VF load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
HS_INLINE void store_half(uint16_t* p, VF a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a, 0)); }
HS_INLINE VF load_bfloat(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
HS_INLINE VF load_int8(const int8_t* p) {
  return to_float(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
HS_INLINE VI izero() { return _mm512_setzero_si512(); }
HS_INLINE VI iset1(int32_t x) { return _mm512_set1_epi32(x); }
HS_INLINE VI iload(const void* p) { return _mm512_loadu_si512(p); }
HS_INLINE void istore(void* p, VI x) { _mm512_storeu_si512(p, x); }
HS_INLINE VI iadd(VI a, VI b) { return _mm512_add_epi32(a, b); }
HS_INLINE VI low_nibbles(VI a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
HS_INLINE VI high_nibbles(VI a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }
HS_INLINE float hsum(VF v) { return _mm512_reduce_add_ps(v); }
HS_INLINE float hmax(VF v) { return _mm512_reduce_max_ps(v); }
HS_INLINE int32_t ihsum(VI v) { return _mm512_reduce_add_epi32(v); }
HS_INLINE void store_codes(int8_t* p, const VI v[2]) {  // 32 numbers as bytes, in order
  _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(v[0]));
  _mm_storeu_si128((__m128i*)(p + 16), _mm512_cvtsepi32_epi8(v[1]));
}
HS_INLINE float largest_pair(const VF v[2]) {  // of |v[2i]| + |v[2i + 1]|
  VF most = zero();
  for (int i = 0; i < 2; i++) {
    const VF a = vabs(v[i]);
    most = vmax(most, add(a, _mm512_permute_ps(a, 0xB1)));
  }
  return hmax(most);
}
HS_INLINE void dot_bytes(VI& sum, VI u8, VI s8) { sum = _mm512_dpbusd_epi32(sum, u8, s8); }
HS_INLINE void dot_nibbles(VI& sum, VI u4, VI s8) { sum = _mm512_dpbusd_epi32(sum, u4, s8); }
HS_INLINE VI finish_nibbles(VI sum) { return sum; }
// 16 outputs of 4 columns in 32 bytes: outputs 0..7 in the low halves, 8..15 in the high halves.
HS_INLINE void load_nibble_panel(const uint8_t* p, VI out[1]) {
  const __m256i both = _mm256_loadu_si256((const __m256i*)p), mask = _mm256_set1_epi8(15);
  const __m256i low = _mm256_and_si256(both, mask), high = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
  out[0] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// -- AVX2, FMA, F16C --------------------------------------------------------------------------------------------------
#elif defined(HS_AVX2)

using VF = __m256;
using VI = __m256i;
constexpr int kLanes = 8;
constexpr int kMaxRows = 6;
constexpr int kMaxRowsInt = 4;

HS_INLINE VF zero() { return _mm256_setzero_ps(); }
HS_INLINE VF set1(float x) { return _mm256_set1_ps(x); }
HS_INLINE VF load(const float* p) { return _mm256_loadu_ps(p); }
HS_INLINE void store(float* p, VF x) { _mm256_storeu_ps(p, x); }
HS_INLINE VF add(VF a, VF b) { return _mm256_add_ps(a, b); }
HS_INLINE VF sub(VF a, VF b) { return _mm256_sub_ps(a, b); }
HS_INLINE VF mul(VF a, VF b) { return _mm256_mul_ps(a, b); }
HS_INLINE VF div(VF a, VF b) { return _mm256_div_ps(a, b); }
HS_INLINE VF fma(VF a, VF b, VF c) { return _mm256_fmadd_ps(a, b, c); }
HS_INLINE VF vmax(VF a, VF b) { return _mm256_max_ps(a, b); }
HS_INLINE VF vmin(VF a, VF b) { return _mm256_min_ps(a, b); }
HS_INLINE VF vabs(VF a) { return _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff))); }
HS_INLINE VF round_even(VF a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
HS_INLINE VI to_int(VF a) { return _mm256_cvtps_epi32(a); }
HS_INLINE VF to_float(VI a) { return _mm256_cvtepi32_ps(a); }
HS_INLINE VF first_lanes(VF a, int n) {
  const VI lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane)));
}
HS_INLINE VF scale_by_power(VF p, VF r) {  // p * 2^r, r whole and at least -126
  const VI exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(r), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(p, _mm256_castsi256_ps(exponent));
}
HS_INLINE VF load_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
HS_INLINE void store_half(uint16_t* p, VF a) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a, 0)); }
HS_INLINE VF load_bfloat(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
HS_INLINE VF load_int8(const int8_t* p) { return to_float(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
HS_INLINE VI izero() { return _mm256_setzero_si256(); }
HS_INLINE VI iset1(int32_t x) { return _mm256_set1_epi32(x); }
HS_INLINE VI iload(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
HS_INLINE void istore(void* p, VI x) { _mm256_storeu_si256((__m256i*)p, x); }
HS_INLINE VI iadd(VI a, VI b) { return _mm256_add_epi32(a, b); }
HS_INLINE VI low_nibbles(VI a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
HS_INLINE VI high_nibbles(VI a) { return _mm256_and_si256(_mm256_srli_epi16(a, 4), _mm256_set1_epi8(15)); }
HS_INLINE float hsum(VF v) {
  __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  a = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(a, _mm_shuffle_ps(a, a, 1)));
}
HS_INLINE float hmax(VF v) {
  __m128 a = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  a = _mm_max_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_max_ss(a, _mm_shuffle_ps(a, a, 1)));
}
HS_INLINE int32_t ihsum(VI v) {
  __m128i a = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  a = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(a, _mm_shuffle_epi32(a, 0xB1)));
}
HS_INLINE void store_codes(int8_t* p, const VI v[4]) {  // 32 numbers as bytes, in order
  const VI pairs = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
  istore(p, _mm256_permutevar8x32_epi32(pairs, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
}
HS_INLINE float largest_pair(const VF v[4]) {  // of |v[2i]| + |v[2i + 1]|
  return hmax(vmax(_mm256_hadd_ps(vabs(v[0]), vabs(v[1])), _mm256_hadd_ps(vabs(v[2]), vabs(v[3]))));
}
// sum += u8 . s8, four neighbours a lane. The caller keeps |s8[2i]| + |s8[2i + 1]| <= 128: no pair saturates 16 bits.
HS_INLINE void dot_bytes(VI& sum, VI u8, VI s8) {
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(u8, s8), _mm256_set1_epi16(1)));
}
// The same for codes up to 15, summed in 16 bits over at most 8 steps (8 * 2 * 15 * 127 fits); finish_nibbles widens.
HS_INLINE void dot_nibbles(VI& sum, VI u4, VI s8) { sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(u4, s8)); }
HS_INLINE VI finish_nibbles(VI sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
// 16 outputs of 4 columns in 32 bytes: outputs 0..7 in the low halves, 8..15 in the high halves.
HS_INLINE void load_nibble_panel(const uint8_t* p, VI out[2]) {
  const VI both = iload(p);
  out[0] = low_nibbles(both);
  out[1] = high_nibbles(both);
}

// -- NEON with dot products -------------------------------------------------------------------------------------------
#elif defined(HS_NEON)

using VF = float32x4_t;
using VI = int32x4_t;
constexpr int kLanes = 4;
constexpr int kMaxRows = 5;
constexpr int kMaxRowsInt = 5;

HS_INLINE VF zero() { return vdupq_n_f32(0); }
HS_INLINE VF set1(float x) { return vdupq_n_f32(x); }
HS_INLINE VF load(const float* p) { return vld1q_f32(p); }
HS_INLINE void store(float* p, VF x) { vst1q_f32(p, x); }
HS_INLINE VF add(VF a, VF b) { return vaddq_f32(a, b); }
HS_INLINE VF sub(VF a, VF b) { return vsubq_f32(a, b); }
HS_INLINE VF mul(VF a, VF b) { return vmulq_f32(a, b); }
HS_INLINE VF div(VF a, VF b) { return vdivq_f32(a, b); }
HS_INLINE VF fma(VF a, VF b, VF c) { return vfmaq_f32(c, a, b); }
HS_INLINE VF vmax(VF a, VF b) { return vmaxq_f32(a, b); }
HS_INLINE VF vmin(VF a, VF b) { return vminq_f32(a, b); }
HS_INLINE VF vabs(VF a) { return vabsq_f32(a); }
HS_INLINE VF round_even(VF a) { return vrndnq_f32(a); }
HS_INLINE VI to_int(VF a) { return vcvtnq_s32_f32(a); }
HS_INLINE VF to_float(VI a) { return vcvtq_f32_s32(a); }
HS_INLINE VF first_lanes(VF a, int n) {
  static const int32_t lanes[4] = {0, 1, 2, 3};
  return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a), vcltq_s32(vld1q_s32(lanes), vdupq_n_s32(n))));
}
HS_INLINE VF scale_by_power(VF p, VF r) {
  return vmulq_f32(p, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(r), vdupq_n_s32(127)), 23)));
}
HS_INLINE VF load_half(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
HS_INLINE void store_half(uint16_t* p, VF a) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a))); }
HS_INLINE VF load_bfloat(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
HS_INLINE VF load_int8(const int8_t* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return to_float(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(word))))));
}
HS_INLINE VI izero() { return vdupq_n_s32(0); }
HS_INLINE VI iset1(int32_t x) { return vdupq_n_s32(x); }
HS_INLINE VI iload(const void* p) { return vreinterpretq_s32_u8(vld1q_u8((const uint8_t*)p)); }
HS_INLINE void istore(void* p, VI x) { vst1q_u8((uint8_t*)p, vreinterpretq_u8_s32(x)); }
HS_INLINE VI iadd(VI a, VI b) { return vaddq_s32(a, b); }
HS_INLINE VI low_nibbles(VI a) { return vreinterpretq_s32_u8(vandq_u8(vreinterpretq_u8_s32(a), vdupq_n_u8(15))); }
HS_INLINE VI high_nibbles(VI a) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(a), 4)); }
HS_INLINE float hsum(VF v) { return vaddvq_f32(v); }
HS_INLINE float hmax(VF v) { return vmaxvq_f32(v); }
HS_INLINE int32_t ihsum(VI v) { return vaddvq_s32(v); }
HS_INLINE void store_codes(int8_t* p, const VI v[8]) {  // 32 numbers as bytes, in order
  for (int i = 0; i < 8; i += 4) {
    const int16x8_t low = vcombine_s16(vqmovn_s32(v[i]), vqmovn_s32(v[i + 1]));
    const int16x8_t high = vcombine_s16(vqmovn_s32(v[i + 2]), vqmovn_s32(v[i + 3]));
    vst1q_s8(p + i * 4, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
  }
}
HS_INLINE float largest_pair(const VF v[8]) {  // of |v[2i]| + |v[2i + 1]|
  VF most = zero();
  for (int i = 0; i < 8; i += 2) most = vmax(most, vpaddq_f32(vabs(v[i]), vabs(v[i + 1])));
  return hmax(most);
}
// u8 - 128 is signed, and 128 times the sum of s8 is what is then missing.
HS_INLINE void dot_bytes(VI& sum, VI u8, VI s8) {
  const int8x16_t a = vreinterpretq_s8_s32(s8);
  sum = vdotq_s32(sum, vreinterpretq_s8_u8(veorq_u8(vreinterpretq_u8_s32(u8), vdupq_n_u8(128))), a);
  sum = vaddq_s32(sum, vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), a), 7));
}
HS_INLINE void dot_nibbles(VI& sum, VI u4, VI s8) {
  sum = vdotq_s32(sum, vreinterpretq_s8_s32(u4), vreinterpretq_s8_s32(s8));
}
HS_INLINE VI finish_nibbles(VI sum) { return sum; }
// 16 outputs of 4 columns in 32 bytes: outputs 0..7 in the low halves, 8..15 in the high halves.
HS_INLINE void load_nibble_panel(const uint8_t* p, VI out[4]) {
  const VI first = iload(p), second = iload(p + 16);
  out[0] = low_nibbles(first);
  out[1] = low_nibbles(second);
  out[2] = high_nibbles(first);
  out[3] = high_nibbles(second);
}

// -- any machine ------------------------------------------------------------------------------------------------------
#else

constexpr int kLanes = 8;
constexpr int kMaxRows = 4;
constexpr int kMaxRowsInt = 4;
typedef float VF __attribute__((vector_size(32)));
typedef int32_t VI __attribute__((vector_size(32)));

HS_INLINE VF set1(float x) { return VF{x, x, x, x, x, x, x, x}; }
HS_INLINE VF zero() { return set1(0); }
HS_INLINE VF load(const float* p) {
  VF x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
HS_INLINE void store(float* p, VF x) { std::memcpy(p, &x, sizeof x); }
HS_INLINE VF add(VF a, VF b) { return a + b; }
HS_INLINE VF sub(VF a, VF b) { return a - b; }
HS_INLINE VF mul(VF a, VF b) { return a * b; }
HS_INLINE VF div(VF a, VF b) { return a / b; }
HS_INLINE VF fma(VF a, VF b, VF c) { return a * b + c; }
HS_INLINE VF vmax(VF a, VF b) { return a > b ? a : b; }
HS_INLINE VF vmin(VF a, VF b) { return a < b ? a : b; }
HS_INLINE VF vabs(VF a) { return (VF)((VI)a & 0x7fffffff); }
HS_INLINE VF round_even(VF a) {
  for (int i = 0; i < kLanes; i++) a[i] = std::nearbyintf(a[i]);
  return a;
}
HS_INLINE VI to_int(VF a) {
  VI out;
  for (int i = 0; i < kLanes; i++) out[i] = int32_t(std::nearbyintf(a[i]));
  return out;
}
HS_INLINE VF to_float(VI a) { return __builtin_convertvector(a, VF); }
HS_INLINE VF first_lanes(VF a, int n) {
  const VI lane = {0, 1, 2, 3, 4, 5, 6, 7};
  return (VF)((VI)a & (lane < n));
}
HS_INLINE VF scale_by_power(VF p, VF r) { return p * (VF)((to_int(r) + 127) << 23); }
HS_INLINE VF load_half(const uint16_t* p) {
  VF x;
  for (int i = 0; i < kLanes; i++) x[i] = half_to_float(p[i]);
  return x;
}
HS_INLINE void store_half(uint16_t* p, VF a) {
  for (int i = 0; i < kLanes; i++) p[i] = float_to_half(a[i]);
}
HS_INLINE VF load_bfloat(const uint16_t* p) {
  VF x;
  for (int i = 0; i < kLanes; i++) x[i] = bfloat_to_float(p[i]);
  return x;
}
HS_INLINE VF load_int8(const int8_t* p) {
  VF x;
  for (int i = 0; i < kLanes; i++) x[i] = float(p[i]);
  return x;
}
HS_INLINE VI iset1(int32_t x) { return VI{x, x, x, x, x, x, x, x}; }
HS_INLINE VI izero() { return iset1(0); }
HS_INLINE VI iload(const void* p) {
  VI x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
HS_INLINE void istore(void* p, VI x) { std::memcpy(p, &x, sizeof x); }
HS_INLINE VI iadd(VI a, VI b) { return a + b; }
HS_INLINE VI low_nibbles(VI a) { return a & 0x0f0f0f0f; }
HS_INLINE VI high_nibbles(VI a) { return (a >> 4) & 0x0f0f0f0f; }
HS_INLINE float hsum(VF v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }
HS_INLINE float hmax(VF v) {
  float most = v[0];
  for (int i = 1; i < kLanes; i++) most = std::max(most, v[i]);
  return most;
}
HS_INLINE int32_t ihsum(VI v) {
  int32_t sum = 0;
  for (int i = 0; i < kLanes; i++) sum += v[i];
  return sum;
}
HS_INLINE void store_codes(int8_t* p, const VI v[4]) {  // 32 numbers as bytes, in order
  for (int i = 0; i < 32; i++) p[i] = int8_t(v[i / kLanes][i % kLanes]);
}
HS_INLINE float largest_pair(const VF v[4]) {  // of |v[2i]| + |v[2i + 1]|
  float most = 0;
  for (int i = 0; i < 32; i += 2) {
    most = std::max(most, std::fabs(v[i / kLanes][i % kLanes]) + std::fabs(v[i / kLanes][i % kLanes + 1]));
  }
  return most;
}
HS_INLINE void dot_bytes(VI& sum, VI u8, VI s8) {
  uint8_t a[4 * kLanes];
  int8_t b[4 * kLanes];
  std::memcpy(a, &u8, sizeof a);
  std::memcpy(b, &s8, sizeof b);
  for (int i = 0; i < kLanes; i++) {
    sum[i] += a[4 * i] * b[4 * i] + a[4 * i + 1] * b[4 * i + 1] + a[4 * i + 2] * b[4 * i + 2] + a[4 * i + 3] * b[4 * i + 3];
  }
}
HS_INLINE void dot_nibbles(VI& sum, VI u4, VI s8) { dot_bytes(sum, u4, s8); }
HS_INLINE VI finish_nibbles(VI sum) { return sum; }
// 16 outputs of 4 columns in 32 bytes: outputs 0..7 in the low halves, 8..15 in the high halves.
HS_INLINE void load_nibble_panel(const uint8_t* p, VI out[2]) {
  const VI both = iload(p);
  out[0] = low_nibbles(both);
  out[1] = high_nibbles(both);
}

#endif

// -- made of the above ------------------------------------------------------------------------------------------------

constexpr int kPanel = 16;                  // outputs (or keys, or columns) of a micro-kernel
constexpr int kPanelVecs = kPanel / kLanes;  // vectors that hold them

HS_INLINE VI broadcast4(const int8_t* p) {  // the same four bytes in every lane
  int32_t word;
  std::memcpy(&word, p, 4);
  return iset1(word);
}

// e4m3fn codes: the bits moved into a half-precision number are the value times 2^-8, and exact. 0x7f and 0xff are NaN
// there and 480 here: packing refuses them.
HS_INLINE VF load_fp8(const uint8_t* p) {
  uint16_t halves[kLanes];
  for (int i = 0; i < kLanes; i++) halves[i] = uint16_t((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7);
  return mul(load_half(halves), set1(256.f));
}

// 2^x, relative error about 2e-7; below -126: 2^-126, so that masked scores must be zeroed by the caller.
HS_INLINE VF exp2_approx(VF x) {
  x = vmin(vmax(x, set1(-126.f)), set1(127.f));
  const VF r = round_even(x), f = sub(x, r);
  VF p = set1(1.535336188319500e-4f);
  p = fma(p, f, set1(1.339887440266574e-3f));
  p = fma(p, f, set1(9.618437357674640e-3f));
  p = fma(p, f, set1(5.550332471162809e-2f));
  p = fma(p, f, set1(2.402264791363012e-1f));
  p = fma(p, f, set1(6.931472028550421e-1f));
  p = fma(p, f, set1(1.0f));
  return scale_by_power(p, r);
}

HS_INLINE VF silu(VF x) {  // x / (1 + e^-x)
  return div(x, add(set1(1.f), exp2_approx(mul(x, set1(-1.44269504088896f)))));
}

}  // namespace HS_ISA
}  // namespace headstart

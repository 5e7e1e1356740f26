// What this machine can do at most: multiplications in registers, by the instructions that the kernels use, and bytes
// read. Loops of no use, which the compiler must not see through. How long they take is the caller's to measure.
#pragma once

#include "peak_args.h"
#include "simd.h"
#include "threads.h"
#include "tiles.h"

// HS_RENEW: a value that the compiler must take for a new one. HS_USED: one that somebody looks at; what nobody does is
// not computed. Portable vectors need not fit a register: there it is memory.
#if defined(HS_AVX512)
#define HS_RENEW(x) asm("" : "+v"(x))
#define HS_USED(x) asm volatile("" : : "v"(x))
#elif defined(HS_AVX2)
#define HS_RENEW(x) asm("" : "+x"(x))
#define HS_USED(x) asm volatile("" : : "x"(x))
#elif defined(HS_NEON)
#define HS_RENEW(x) asm("" : "+w"(x))
#define HS_USED(x) asm volatile("" : : "w"(x))
#else
#define HS_RENEW(x) asm("" : "+m"(x))
#define HS_USED(x) asm volatile("" : : "m"(x))
#endif

namespace headstart {
namespace HS_ISA {

// Independent sums: as many as hide the latency of the multiplication (up to 5 cycles, two a cycle).
#if defined(HS_AVX512) || defined(HS_NEON)
constexpr int kFloatSums = 16, kIntSums = 12;
#else
constexpr int kFloatSums = 10, kIntSums = 8;
#endif
constexpr int kNibbleSteps = 8;  // that may be summed in 16 bits before they are widened: a group of 32 columns

static __attribute__((noinline)) void multiply_add_floats(int64_t rounds) {
  VF sums[kFloatSums], a = set1(1.f), b = set1(1e-9f);
  HS_UNROLL for (int i = 0; i < kFloatSums; i++) sums[i] = zero();
  for (int64_t round = 0; round < rounds; round++) {
    HS_RENEW(a);
    HS_UNROLL for (int i = 0; i < kFloatSums; i++) {
      sums[i] = fma(a, b, sums[i]);
      HS_RENEW(sums[i]);
    }
  }
  HS_UNROLL for (int i = 0; i < kFloatSums; i++) HS_USED(sums[i]);
}

static __attribute__((noinline)) void multiply_bytes(int64_t rounds) {
  VI sums[kIntSums], a = iset1(0x01020301), b = iset1(0x01ff0102);
  HS_UNROLL for (int i = 0; i < kIntSums; i++) sums[i] = izero();
  for (int64_t round = 0; round < rounds; round++) {
    HS_UNROLL for (int i = 0; i < kIntSums; i++) {
      HS_RENEW(a);
      dot_bytes(sums[i], a, b);
      HS_RENEW(sums[i]);
    }
  }
  HS_UNROLL for (int i = 0; i < kIntSums; i++) HS_USED(sums[i]);
}

static __attribute__((noinline)) void multiply_nibbles(int64_t rounds) {
  VI total = izero(), a = iset1(0x01020301), b = iset1(0x01ff0102);
  for (int64_t round = 0; round < rounds; round += kNibbleSteps) {
    VI sums[kIntSums];
    HS_UNROLL for (int i = 0; i < kIntSums; i++) sums[i] = izero();
    HS_UNROLL for (int step = 0; step < kNibbleSteps; step++) {
      HS_UNROLL for (int i = 0; i < kIntSums; i++) {
        HS_RENEW(a);
        dot_nibbles(sums[i], a, b);
        HS_RENEW(sums[i]);
      }
    }
    HS_UNROLL for (int i = 0; i < kIntSums; i++) total = iadd(total, finish_nibbles(sums[i]));
    HS_RENEW(total);
  }
  HS_USED(total);
}

#if defined(HS_AMX)
constexpr int64_t kTileProducts = 4;  // a round
constexpr int64_t kTileMultiplications = int64_t(kTileRows) * kPanel * kGroup;

// Sums leave the tiles after every group of 32 columns, as they must to be scaled.
static __attribute__((noinline)) void multiply_tiles_of_codes(int64_t rounds) {
  alignas(64) int32_t sums[kTileProducts][kTileRows * kPanel];
  alignas(64) static const uint8_t zeros[1024] = {};
  const Tiles configured;
  _tile_loadd(4, zeros, kGroup);
  _tile_loadd(5, zeros, 64);
  for (int64_t round = 0; round < rounds; round++) {
    _tile_zero(0);
    _tile_dpbssd(0, 4, 5);
    _tile_zero(1);
    _tile_dpbssd(1, 4, 5);
    _tile_zero(2);
    _tile_dpbssd(2, 4, 5);
    _tile_zero(3);
    _tile_dpbssd(3, 4, 5);
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
  }
}
#endif

// Multiplications of `items` runs of `rounds` rounds, shared out among the threads.
static double multiply_most(ThreadPool& threads, Mix mix, int items, int64_t rounds) {
#if defined(HS_AMX)
  if (mix != Mix::kFloat32) {
    const int64_t fewer = std::max<int64_t>(1, rounds / 8);  // a round takes that much longer than one of vectors
    threads.parallel(items, [&](int, int) { multiply_tiles_of_codes(fewer); });
    return double(items) * double(fewer) * double(kTileProducts * kTileMultiplications);
  }
#endif
  threads.parallel(items, [&](int, int) {
    switch (mix) {
      case Mix::kFloat32: return multiply_add_floats(rounds);
      case Mix::kInt8: return multiply_bytes(rounds);
      case Mix::kInt4: return multiply_nibbles(rounds);
    }
  });
  const int64_t whole = (rounds + kNibbleSteps - 1) / kNibbleSteps * kNibbleSteps;
  const double done = double(items) * double(mix == Mix::kInt4 ? whole : rounds);
  return done * kLanes * (mix == Mix::kFloat32 ? kFloatSums : 4 * kIntSums);
}

// STREAMS stretches of the slice side by side, as the kernels read several panels: one alone waits for memory longer.
template <int STREAMS>
static __attribute__((noinline)) void read_slice(const uint8_t* slice, size_t bytes) {
  constexpr size_t kLine = 64, kVectors = kLine / sizeof(VI);
  constexpr size_t kAhead = 1024;
  const size_t each = bytes / STREAMS / kLine * kLine;
  VI sums[STREAMS];
  HS_UNROLL for (int s = 0; s < STREAMS; s++) sums[s] = izero();
  for (size_t at = 0; at < each; at += kLine) {
    HS_UNROLL for (int s = 0; s < STREAMS; s++) {
      const uint8_t* line = slice + size_t(s) * each + at;
      __builtin_prefetch(line + kAhead);
      HS_UNROLL for (size_t v = 0; v < kVectors; v++) sums[s] = iadd(sums[s], iload(line + v * sizeof(VI)));
    }
  }
  HS_UNROLL for (int s = 0; s < STREAMS; s++) HS_USED(sums[s]);
}

// Reads `num_slices` slices one after the other in memory, each `repeats` times by whichever thread takes it.
static void read_most(ThreadPool& threads, const ReadArgs& args) {
  threads.parallel(args.num_slices, [&](int item, int) {
    const uint8_t* slice = args.data + size_t(item) * args.slice_bytes;
    for (int i = 0; i < args.repeats; i++) {
      if (args.streams > 1) {
        read_slice<4>(slice, args.slice_bytes);
      } else {
        read_slice<1>(slice, args.slice_bytes);
      }
    }
  });
}

}  // namespace HS_ISA
}  // namespace headstart

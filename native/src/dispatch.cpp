#include "dispatch.h"

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#if defined(HS_HAVE_NEON)
#include <sys/auxv.h>
#elif defined(HS_HAVE_X86)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace headstart {

namespace {

#if defined(HS_HAVE_X86)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}

// Linux saves 8 KiB more of a thread's state for who asks to use the matrix unit (Documentation/arch/x86/xstate.rst).
bool may_use_amx() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  constexpr unsigned kTileAndInt8 = 1u << 24 | 1u << 25;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kTileAndInt8) != kTileAndInt8) return false;
  static const bool allowed = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return allowed;
}
#endif

bool runs_here(const Kernels& kernels) {
  const std::string name = kernels.name;
#if defined(HS_HAVE_X86)
  if (name == "avx2") {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  }
  if (name == "avx512") return has_avx512();
  if (name == "amx") return has_avx512() && may_use_amx();
#elif defined(HS_HAVE_NEON)
  if (name == "neon") return (getauxval(AT_HWCAP) & (1ul << 20)) != 0;  // HWCAP_ASIMDDP
#endif
  return name == "portable";
}

constexpr int kCheckedOutputs = 40, kCheckedInputs = 230;

// A small layer in one format: every row count of the micro-kernels, outputs and inputs that fill no panel or group.
std::vector<float> small_layer(const Kernels& kernels, Format format, int rows) {
  std::mt19937 random(7);
  std::vector<uint8_t> memory(size_t(1) << 16, 0);
  Weight weight{format, kCheckedOutputs, kCheckedInputs, nullptr};
  weight.data = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
  std::vector<float> values(kCheckedInputs);
  std::vector<uint8_t> codes(kCheckedInputs + kGroup);
  std::vector<uint16_t> scales(size_t(weight.num_groups())), minimums(scales.size());
  for (int output = 0; output < kCheckedOutputs; output++) {
    for (float& value : values) value = float(int(random() % 201) - 100) / 64;
    for (uint8_t& code : codes) code = uint8_t(random() % 120);
    // Halves from 1/16 to 1/8, and from -1/8 to -1/4.
    for (uint16_t& scale : scales) scale = uint16_t(0x2c00 + random() % 0x400);
    for (uint16_t& minimum : minimums) minimum = uint16_t(0xb000 + random() % 0x400);
    if (is_grouped(format)) {
      pack_group_row(weight, output, codes.data(), scales.data(), minimums.data());
    } else if (format == Format::kFp8) {
      pack_fp8_row(weight, output, codes.data(), 0.25f);
    } else {
      pack_float_row(weight, output, values.data());
    }
  }
  std::vector<float> x(size_t(rows) * kCheckedInputs), out(size_t(rows) * kCheckedOutputs, 0);
  for (float& value : x) value = float(int(random() % 2001) - 1000) / 512;
  ThreadPool threads(1);
  kernels.linear(threads, LinearArgs{&weight, nullptr, RowNorm{}, x.data(), size_t(kCheckedInputs), rows, out.data(),
                                     size_t(kCheckedOutputs), false});
  return out;
}

}  // namespace

std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> best_first;
#if defined(HS_HAVE_X86)
  best_first = {&kernels_amx(), &kernels_avx512(), &kernels_avx2()};
#elif defined(HS_HAVE_NEON)
  best_first = {&kernels_neon()};
#endif
  best_first.push_back(&kernels_portable());
  std::vector<const Kernels*> usable;
  for (const Kernels* kernels : best_first) {
    if (runs_here(*kernels)) usable.push_back(kernels);
  }
  return usable;
}

bool agrees_with_portable(const Kernels& kernels) {
  for (Format format : {Format::kFloat32, Format::kBfloat16, Format::kFp8, Format::kQ8_0, Format::kQ4_0, Format::kQ4_1}) {
    for (int rows : {1, 2, 3, 4, 7, 13, 29}) {
      const std::vector<float> expected = small_layer(kernels_portable(), format, rows);
      const std::vector<float> found = small_layer(kernels, format, rows);
      float largest = 0;
      for (float value : expected) largest = std::max(largest, std::fabs(value));
      for (size_t i = 0; i < expected.size(); i++) {
        if (!(std::fabs(found[i] - expected[i]) <= 1e-4f * largest)) return false;
      }
    }
  }
  return true;
}

}  // namespace headstart

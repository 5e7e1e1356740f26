// The operations by name, for one instruction set. Which sets there are is decided at build, which is used at run time.
#pragma once

#include "kv.h"
#include "linear_args.h"
#include "peak_args.h"
#include "threads.h"

namespace headstart {

struct Kernels {
  const char* name;
  void (*linear)(ThreadPool&, const LinearArgs&);
  void (*gated_mlp)(ThreadPool&, const MlpArgs&);
  void (*rotate_and_write)(ThreadPool&, const KvLayout&, uint8_t*, const RotateArgs&);
  void (*attend)(ThreadPool&, const KvLayout&, const uint8_t*, const AttendArgs&);
  double (*multiply_most)(ThreadPool&, Mix, int items, int64_t rounds);
  void (*read_most)(ThreadPool&, const ReadArgs&);
};

const Kernels& kernels_portable();
#if defined(HS_HAVE_X86)
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
const Kernels& kernels_amx();
#elif defined(HS_HAVE_NEON)
const Kernels& kernels_neon();
#endif

}  // namespace headstart

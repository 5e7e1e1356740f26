// Compiled once for each instruction set; see CMakeLists.txt.
#include "kernels.h"

#include "attention.h"
#include "linear.h"
#include "peaks.h"
#include "rotary.h"

#define HS_JOIN_(a, b) a##b
#define HS_JOIN(a, b) HS_JOIN_(a, b)
#define HS_TEXT_(a) #a
#define HS_TEXT(a) HS_TEXT_(a)

namespace headstart {

const Kernels& HS_JOIN(kernels_, HS_ISA)() {
  static const Kernels kernels{HS_TEXT(HS_ISA), HS_ISA::linear, HS_ISA::gated_mlp,
                               HS_ISA::rotate_and_write, HS_ISA::attend, HS_ISA::multiply_most, HS_ISA::read_most};
  return kernels;
}

}  // namespace headstart

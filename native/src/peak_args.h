// What the measurements of the machine's peaks take, on every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headstart {

// The multiplications that linear layers are made of: floats, 8-bit codes, 4-bit codes (both with 8-bit activations).
enum class Mix : int { kFloat32 = 0, kInt8 = 1, kInt4 = 2 };

struct ReadArgs {
  const uint8_t* data;
  size_t slice_bytes;  // a multiple of 256
  int num_slices;
  int repeats;  // of each slice: what is small enough then comes from a cache
  int streams;  // read side by side: 1 or 4
};

}  // namespace headstart

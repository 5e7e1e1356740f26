// Which instruction sets this machine runs, and whether a set computes what the portable one does.
#pragma once

#include <vector>

#include "kernels.h"

namespace headstart {

// Best first; the portable set is always the last.
std::vector<const Kernels*> usable_kernels();

// A check of milliseconds at start: a set that no developer's machine has must not serve wrong numbers.
bool agrees_with_portable(const Kernels& kernels);

}  // namespace headstart

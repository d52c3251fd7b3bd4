// The handle of a group over shared memory, which the Python wrapper owns: a pointer as an integer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dcprt/shm_group.h"

namespace dcprt::binding {

struct ShmMapping {
  void* base;
  size_t bytes;
  ShmGroup group;
};

inline ShmGroup& GroupOf(int64_t handle) { return reinterpret_cast<ShmMapping*>(handle)->group; }

}  // namespace dcprt::binding

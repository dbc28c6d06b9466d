// Parallel loops whose body is a function object: body(index, worker). See threads.h.
#pragma once

#include "core/target.h"
#include "threads.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

template <class Body>
void parallel_for(int64_t count, int threads, const Body& body) {
  fusedconv::parallel_for(
      count, threads,
      [](void* context, int64_t i, int worker) { (*static_cast<const Body*>(context))(i, worker); },
      const_cast<Body*>(&body));
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

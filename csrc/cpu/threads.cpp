#include "threads.h"

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#endif

namespace fusedconv {
namespace {

struct Loop {
  std::atomic<int64_t> next_index{0};
  std::atomic<int> next_worker{0};
  int64_t count;
  LoopBody body;
  void* context;

  void work() {
    const int worker = next_worker++;
    for (int64_t i = next_index++; i < count; i = next_index++) body(context, i, worker);
  }
};

#if defined(__linux__)

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

// The team of an OpenMP runtime does not survive a fork: a child that uses it hangs, so it runs serially.
std::atomic<bool> in_forked_child{false};
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { in_forked_child = true; });

int find_openmp(dl_phdr_info* info, size_t, void* result) {
  const char* path = info->dlpi_name;
  if (path == nullptr) return 0;
  const char* slash = std::strrchr(path, '/');
  const char* name = slash != nullptr ? slash + 1 : path;
  // All three runtimes export GOMP_parallel. PyTorch's wheels carry libgomp under a hashed name.
  for (const char* runtime : {"libgomp", "libiomp5", "libomp"}) {
    if (std::strncmp(name, runtime, std::strlen(runtime)) != 0) continue;
    *static_cast<const char**>(result) = path;
    return 1;
  }
  return 0;
}

// Linking an OpenMP runtime would bring a second one beside PyTorch's; so its entry is looked up where it is
// loaded.
GompParallel loaded_gomp_parallel() {
  const char* path = nullptr;
  dl_iterate_phdr(find_openmp, &path);
  if (path == nullptr) return nullptr;
  void* library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  return reinterpret_cast<GompParallel>(dlsym(library, "GOMP_parallel"));
}

bool runs_serially() { return in_forked_child; }

bool run_on_openmp(Loop& loop, int threads) {
  static const GompParallel gomp_parallel = loaded_gomp_parallel();
  if (gomp_parallel == nullptr) return false;
  gomp_parallel([](void* data) { static_cast<Loop*>(data)->work(); }, &loop, unsigned(threads), 0);
  return true;
}

#else

bool runs_serially() { return false; }
bool run_on_openmp(Loop&, int) { return false; }

#endif

void run_on_std_threads(Loop& loop, int threads) {
  std::vector<std::thread> team;
  for (int t = 1; t < threads; ++t) team.emplace_back([&loop] { loop.work(); });
  loop.work();
  for (std::thread& thread : team) thread.join();
}

}  // namespace

void parallel_for(int64_t count, int threads, LoopBody body, void* context) {
  Loop loop;
  loop.count = count;
  loop.body = body;
  loop.context = context;
  if (threads > count) threads = int(count);
  if (threads <= 1 || runs_serially()) {
    loop.work();
  } else if (!run_on_openmp(loop, threads)) {
    run_on_std_threads(loop, threads);
  }
}

}  // namespace fusedconv

#include "threads.h"

#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <dlfcn.h>
#include <pthread.h>
#include <sys/stat.h>
#endif

#if defined(__SSE2__)
#include <immintrin.h>
#else
#include <cfenv>
#endif

namespace fusedconv {
namespace {

// How a thread computes: its rounding, and whether it flushes denormals.
#if defined(__SSE2__)  // fenv_t has x87's state too, and takes twenty times as long
struct FloatMode {
  unsigned control = _mm_getcsr();
  void set() const { _mm_setcsr(control); }
};
#else
struct FloatMode {
  std::fenv_t environment;
  FloatMode() { std::fegetenv(&environment); }
  void set() const { std::fesetenv(&environment); }
};
#endif

struct Loop {
  int64_t count;
  int threads;
  LoopBody body;
  void* context;
  FloatMode callers_mode{};
  std::atomic<int64_t> next_index{0};
  std::atomic<int> next_worker{0};

  // The next indices for one thread. Many at first: two threads side by side would meet on the same fresh
  // pages of memory, which the system then clears twice. Few in the end, so that all are done at the same
  // time.
  int64_t take(int64_t& end) {
    int64_t begin = next_index;
    do {
      const int64_t share = (count - begin) / (2 * threads);
      end = begin + (share > 1 ? share : 1);
    } while (!next_index.compare_exchange_weak(begin, end));
    return begin;
  }

  void work() {
    const int worker = next_worker++;
    int64_t end;
    for (int64_t i = take(end); i < count; i = take(end)) {
      for (; i < end; ++i) body(context, i, worker);
    }
  }

  // Of a thread that others use too.
  void work_as_the_caller() {
    const FloatMode own_mode;
    callers_mode.set();
    work();
    own_mode.set();
  }
};

#if defined(__linux__)

// A thread's OpenMP team does not survive a fork, and libgomp waits for it for ever in the next region of the
// thread that forked. Whether that thread had a team cannot be asked, but a process of one thread had none.
// Threads that the child starts get teams of their own.
thread_local bool has_others_at_fork = false;
thread_local bool may_have_lost_its_team = false;

bool is_the_only_thread() {
  struct stat tasks;
  return stat("/proc/self/task", &tasks) == 0 && tasks.st_nlink == 3;  // ".", "..", and one a thread
}

[[maybe_unused]] const int registered =
    pthread_atfork([] { has_others_at_fork = !is_the_only_thread(); }, nullptr,
                   [] { may_have_lost_its_team |= has_others_at_fork; });

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

// Linking an OpenMP runtime would bring a second one beside PyTorch's, whose file may have any name; and
// another package may have loaded one of its own. So the entry is looked up among what PyTorch's library
// itself is linked to.
GompParallel gomp_parallel_of_torch() {
  void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  return torch == nullptr ? nullptr : reinterpret_cast<GompParallel>(dlsym(torch, "GOMP_parallel"));
}

bool run_on_openmp(Loop& loop, int threads) {
  static const GompParallel gomp_parallel = gomp_parallel_of_torch();
  if (gomp_parallel == nullptr || may_have_lost_its_team) return false;
  gomp_parallel([](void* data) { static_cast<Loop*>(data)->work_as_the_caller(); }, &loop, unsigned(threads),
                0);
  return true;
}

#else

bool run_on_openmp(Loop&, int) { return false; }

#endif

void run_on_std_threads(Loop& loop, int threads) {
  std::vector<std::thread> team;
  try {
    for (int t = 1; t < threads; ++t) team.emplace_back([&loop] { loop.work_as_the_caller(); });
  } catch (
      const std::system_error&) {  // the system gives no more threads: those that are there do all the work
  }
  loop.work();
  for (std::thread& thread : team) thread.join();
}

}  // namespace

void parallel_for(int64_t count, int threads, LoopBody body, void* context) {
  if (threads > count) threads = int(count);
  Loop loop{count, threads, body, context};
  if (threads <= 1) {
    loop.work();
  } else if (!run_on_openmp(loop, threads)) {
    run_on_std_threads(loop, threads);
  }
}

}  // namespace fusedconv

// What must hold of csrc/core/checked.h at the edges of its type: a program that says what does not.
#include "core/checked.h"

#include <cstdio>

using fusedconv::Checked;

namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
int faults = 0;

// Holds a result against the one that is right; null where there is none.
template <class Formula>
void hold(const char* what, const Formula& formula, const int64_t* right) {
  try {
    const int64_t found = formula();
    if (right != nullptr && found == *right) return;
    std::printf("%s gives %lld\n", what, static_cast<long long>(found));
  } catch (const std::overflow_error& error) {
    if (right == nullptr) return;
    std::printf("%s: %s\n", what, error.what());
  }
  ++faults;
}

template <class Formula>
void gives(const char* what, const Formula& formula, int64_t right) {
  hold(what, formula, &right);
}

template <class Formula>
void fails(const char* what, const Formula& formula) {
  hold(what, formula, nullptr);
}

}  // namespace

int main() {
  gives("the largest sum", [] { return (Checked(kMost - 1) + 1).value(); }, kMost);
  fails("a sum", [] { return (Checked(kMost) + 1).value(); });
  gives("the least difference", [] { return (Checked(kLeast + 1) - 1).value(); }, kLeast);
  fails("a difference", [] { return (Checked(kLeast) - 1).value(); });
  gives("the largest product", [] { return (Checked(kMost / 7) * 7).value(); }, kMost);
  fails("a product that wraps to 0", [] { return (Checked(int64_t(1) << 32) * (int64_t(1) << 32)).value(); });
  fails("a product in a formula", [] { return (1 + Checked(kMost) * 2 - kMost).value(); });
  gives("the largest int", [] { return int64_t(Checked(2147483647).to<int>()); }, 2147483647);
  fails("more than an int", [] { return int64_t(Checked(2147483648).to<int>()); });
  fails("less than an int", [] { return int64_t(Checked(-2147483649).to<int>()); });
  gives("the largest quotient", [] { return divide_up(Checked(kMost), 2).value(); }, kMost / 2 + 1);
  gives("a multiple", [] { return round_up(Checked(9), 8).value(); }, 16);
  fails("a multiple beyond", [] { return round_up(Checked(kMost), 8).value(); });
  return faults == 0 ? 0 : 1;
}

#include "plan.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <tuple>

namespace fusedconv {
namespace {

constexpr const char* kPaths[] = {"direct", "two-step", "chain", "plain"};
constexpr const char* kInstructionSets[] = {"", "baseline", "avx2", "avx512", "sm_80", "sm_90a"};

}  // namespace

const char* name_of(Path path) { return kPaths[size_t(path)]; }
const char* name_of(Instructions instructions) { return kInstructionSets[size_t(instructions)]; }

Instructions instructions_named(const std::string& name) {
  const auto found = std::find(std::begin(kInstructionSets), std::end(kInstructionSets), name);
  if (name.empty() || found == std::end(kInstructionSets))
    throw std::invalid_argument("fusedconv: no instructions are called '" + name + "'");
  return Instructions(found - std::begin(kInstructionSets));
}

std::string words_of(const Plan& plan) {
  std::string words = name_of(plan.instructions);
  for (const Remark& remark : plan.remarks) words += (words.empty() ? "" : ", ") + words_of(remark);
  return words;
}

std::string text_of(const Plan& plan) {
  const std::string words = words_of(plan);
  return words.empty() ? name_of(plan.path) : name_of(plan.path) + (", " + words);
}

bool operator==(const Plan& a, const Plan& b) {
  const auto all = [](const Plan& plan) {
    return std::tie(plan.path, plan.instructions, plan.remarks, plan.workspace, plan.terms);
  };
  return all(a) == all(b);
}

}  // namespace fusedconv

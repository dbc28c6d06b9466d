// Who runs a call, and why: what Python, the debug log and explain are told, on every device.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "reason.h"

namespace fusedconv {

enum class Path {
  kDirect,   // our conv with the chain in it
  kTwoStep,  // PyTorch's conv, then the chain
  kChain,    // the chain, on a given tensor
  kPlain     // PyTorch's operators only
};

// That our conv is made of; kNone: it is PyTorch's, or there is none. kSm80 multiplies by mma.sync, kSm90a by
// wgmma.
enum class Instructions { kNone, kBaseline, kAvx2, kAvx512, kSm80, kSm90a };

struct Plan {
  Path path;
  Instructions instructions = Instructions::kNone;
  std::vector<Remark> remarks{};  // the first one is the reason; none of a given tensor's chain
  size_t workspace = 0;           // bytes of memory that a run wants on a CUDA device, at a multiple of 256
  int terms = 1;                  // products of the machine's that add up to one of our conv's

  // Whether a kernel of ours runs all of it.
  bool is_ours() const { return path == Path::kDirect || path == Path::kChain; }
};

// PyTorch's conv, or all of its operators.
inline Plan two_step(const Remark& reason) { return {Path::kTwoStep, Instructions::kNone, {reason}}; }
inline Plan plain(const Remark& reason) { return {Path::kPlain, Instructions::kNone, {reason}}; }

const char* name_of(Path path);
const char* name_of(Instructions instructions);
// Throws std::invalid_argument for a name that is none.
Instructions instructions_named(const std::string& name);
// All but the path.
std::string words_of(const Plan& plan);
std::string text_of(const Plan& plan);
bool operator==(const Plan& a, const Plan& b);

}  // namespace fusedconv

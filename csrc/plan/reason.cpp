#include "reason.h"

namespace fusedconv {
namespace {

constexpr const char* kNames[] = {
#define FUSEDCONV_NAME(enumerator, name, words) name,
    FUSEDCONV_FOR_EACH_REASON(FUSEDCONV_NAME)
#undef FUSEDCONV_NAME
};

constexpr const char* kWords[] = {
#define FUSEDCONV_WORDS(enumerator, name, words) words,
    FUSEDCONV_FOR_EACH_REASON(FUSEDCONV_WORDS)
#undef FUSEDCONV_WORDS
};

// Calls plain(text) and number(name, value) for what the words are made of.
template <class Plain, class Number>
void read_words(const Remark& remark, const Plain& plain, const Number& number) {
  const std::string words = kWords[size_t(remark.reason)];
  size_t begin = 0, count = 0;
  for (size_t open = words.find('{'); open != std::string::npos; open = words.find('{', begin)) {
    const size_t close = words.find('}', open);
    plain(words.substr(begin, open - begin));
    number(words.substr(open + 1, close - open - 1), remark.numbers.at(count++));
    begin = close + 1;
  }
  plain(words.substr(begin));
}

}  // namespace

const char* name_of(Reason reason) { return kNames[size_t(reason)]; }

std::string words_of(const Remark& remark) {
  std::string text;
  read_words(
      remark, [&](const std::string& plain) { text += plain; },
      [&](const std::string&, int64_t value) { text += std::to_string(value); });
  return text;
}

std::map<std::string, int64_t> numbers_of(const Remark& remark) {
  std::map<std::string, int64_t> numbers;
  read_words(
      remark, [](const std::string&) {},
      [&](const std::string& name, int64_t value) { numbers[name] = value; });
  return numbers;
}

}  // namespace fusedconv

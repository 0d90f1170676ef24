#include "nearest.h"

#include <algorithm>
#include <cctype>

namespace pariskv::python {

namespace {

/** Small letters and digits alone: "sign_norm" and "SignNorm" are one name. */
std::string bare(const std::string& name) {
  std::string text;
  for (const char letter : name) {
    if (std::isalnum(static_cast<unsigned char>(letter)) != 0) {
      text += char(std::tolower(static_cast<unsigned char>(letter)));
    }
  }
  return text;
}

/** Letters to insert, remove, change or swap with the next one, to make `b` of `a`. */
size_t edits(const std::string& a, const std::string& b) {
  std::vector<size_t> before, last(b.size() + 1), now(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    now[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      now[j] = std::min({last[j] + 1, now[j - 1] + 1, last[j - 1] + size_t(a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        now[j] = std::min(now[j], before[j - 2] + 1);
      }
    }
    before = last;
    last = now;
  }
  return last[b.size()];
}

}  // namespace

std::string nearest(const std::string& given, const std::vector<std::string>& names) {
  constexpr size_t kLongest = 64;  // letters: beyond that nothing is near
  constexpr size_t kBegin = 4;     // that a name's beginning has at least
  const std::string wanted = bare(given);
  if (wanted.empty() || wanted.size() > kLongest) return "";
  std::string found;
  size_t least = wanted.size() / 4 + 2;  // edits: one in four letters, and one
  for (const std::string& name : names) {
    const std::string known = bare(name);
    size_t distance = edits(wanted, known);
    if (wanted.size() >= kBegin && known.compare(0, wanted.size(), wanted) == 0) distance = 1;
    if (distance < least && distance < known.size()) {
      least = distance;
      found = name;
    }
  }
  return found;
}

std::string did_you_mean(const std::string& given, const std::vector<std::string>& names) {
  const std::string name = nearest(given, names);
  return name.empty() ? "" : "; did you mean " + name + "?";
}

}  // namespace pariskv::python

#include "settings.h"

#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <sstream>
#include <stdexcept>

#include "pariskv/sizes.h"

namespace pariskv::ggml {

namespace {

constexpr int64_t kAny = std::numeric_limits<int64_t>::max();

using Setter = std::function<void(const std::string&)>;

std::string trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t\r");
  if (begin == std::string::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

[[noreturn]] void refuse(const std::string& name, const std::string& expected,
                         const std::string& value) {
  throw std::invalid_argument("[PARISKV_GGML] " + name + ": expected " + expected + ", got '" +
                              value + "'");
}

/** `out` is a number, or an optional one. */
template <typename Out>
Setter whole(const char* name, Out* out, int64_t least, int64_t most = kAny) {
  return [=](const std::string& value) {
    size_t read = 0;
    int64_t number = 0;
    try {
      number = std::stoll(value, &read);
    } catch (const std::exception&) {
      read = 0;
    }
    if (read == 0 || read != value.size() || number < least || number > most) {
      const std::string range =
          most == kAny ? "of at least " + std::to_string(least)
                       : "from " + std::to_string(least) + " to " + std::to_string(most);
      refuse(name, "a whole number " + range, value);
    }
    *out = number;
  };
}

Setter number(const char* name, std::optional<uint64_t>* out) {
  return [=](const std::string& value) {
    int64_t own = 0;
    whole(name, &own, 0)(value);
    *out = uint64_t(own);
  };
}

Setter flag(const char* name, bool* out) {
  return [=](const std::string& value) {
    if (value != "0" && value != "1") refuse(name, "0 or 1", value);
    *out = value == "1";
  };
}

Setter share(const char* name, std::optional<double>* out) {
  return [=](const std::string& value) {
    std::istringstream stream(value);
    double number = 0;
    if (!(stream >> number) || !stream.eof() || !(number > 0 && number < 1)) {
      refuse(name, "a number above 0 and below 1", value);
    }
    *out = number;
  };
}

/** Commas, semicolons and ends of lines part settings; what follows a # is a remark. */
std::string read_file(const std::string& path) {
  std::ifstream file(path);
  if (!file) refuse("@", "the path of a file that can be read", path);
  std::string line, text;
  while (std::getline(file, line)) text += line.substr(0, line.find('#')) + ",";
  return text;
}

}  // namespace

Settings read_settings(const std::string& given) {
  Settings settings;
  const std::map<std::string, Setter> setters = {
      {"on", flag("on", &settings.on)},
      {"from", whole("from", &settings.from, 1)},
      // Limits of the engine's, which would otherwise refuse every cache later on.
      {"top_k", whole("top_k", &settings.top_k, 1, kMostTokens)},
      {"error", share("error", &settings.error)},
      {"tail_rows", whole("tail_rows", &settings.tail_rows, 16, 8192)},
      {"seed", number("seed", &settings.seed)},
      {"local", whole("local", &settings.local, -1, kMostTokens)},
      {"dense_below", whole("dense_below", &settings.dense_below, -1, kMostTokens)},
      {"most_tokens", whole("most_tokens", &settings.most_tokens, 1)},
      {"memory", whole("memory", &settings.memory, 0, kAny >> 20)},
      {"check", flag("check", &settings.check)},
  };
  const std::string all = trimmed(given);
  std::string text = !all.empty() && all[0] == '@' ? read_file(trimmed(all.substr(1))) : all;
  for (char& c : text) c = c == ';' || c == '\n' ? ',' : c;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) {
    part = trimmed(part);
    if (part.empty()) continue;
    const size_t equals = part.find('=');
    const std::string name = trimmed(part.substr(0, equals));
    const auto setter = setters.find(name);
    if (setter == setters.end()) {
      std::string names;
      for (const auto& known : setters) names += (names.empty() ? "" : ", ") + known.first;
      refuse("names", "some of " + names, name);
    }
    if (equals == std::string::npos) refuse(name, "name=value", part);
    setter->second(trimmed(part.substr(equals + 1)));
  }
  return settings;
}

}  // namespace pariskv::ggml

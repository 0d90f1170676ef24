/** The settings of a cache as text, for a saved file: some have to be the same to load it. */
#pragma once

#include <string>
#include <vector>

#include "pariskv/config.h"

namespace pariskv {

struct Setting {
  std::string name;
  std::string value;
  bool must_match;  // bytes of the file are made with it
  std::string before =
      {};  // the value that files had before there was this setting; empty: none had
};

/** @param config resolved */
std::vector<Setting> settings_of(const Config& config);

/** One a line, "name=value". */
std::string text_of(const std::vector<Setting>& settings);

/** Throws unless the settings of a file, as text, have what `config` needs. */
void check_settings(const std::string& path, const std::string& text, const Config& config);

}  // namespace pariskv

/** What a name that is not known was meant to be. */
#pragma once

#include <string>
#include <vector>

namespace pariskv::python {

/** The one of these names that is spelled nearest to `given`; empty: none is near. */
std::string nearest(const std::string& given, const std::vector<std::string>& names);

/** "; did you mean top_k?", or nothing. */
std::string did_you_mean(const std::string& given, const std::vector<std::string>& names);

}  // namespace pariskv::python

#include "policy/policy.h"

#include <variant>

#include "policy/hardkv/policy.h"
#include "policy/pariskv/policy.h"
#include "policy/prkv/policy.h"

namespace pariskv {

namespace {

// One overload per policy: the settings choose it.

std::unique_ptr<Policy> make(const ParisKV& settings, const Config& config, const ModelShape& shape,
                             Backend& backend) {
  return std::make_unique<ParisKVPolicy>(settings, config.sink, config.dense_below, shape, backend);
}

std::unique_ptr<Policy> make(const HardKV& settings, const Config& config, const ModelShape& shape,
                             Backend& backend) {
  return std::make_unique<HardKVPolicy>(settings, config.dense_below, shape, backend);
}

std::unique_ptr<Policy> make(const PRKV& settings, const Config& config, const ModelShape& shape,
                             Backend& backend) {
  return std::make_unique<PRKVPolicy>(settings, config.dense_below, shape, backend);
}

}  // namespace

std::unique_ptr<Policy> make_policy(const Config& config, const ModelShape& shape,
                                    Backend& backend) {
  return std::visit([&](const auto& settings) { return make(settings, config, shape, backend); },
                    config.policy);
}

}  // namespace pariskv

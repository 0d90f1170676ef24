#include "policy/policy.h"

#include <variant>

#include "policy/hardkv/policy.h"
#include "policy/pariskv/policy.h"
#include "policy/prkv/policy.h"

namespace pariskv {

namespace {

// One overload per policy: the settings choose it.

std::unique_ptr<Policy> make(const ParisKv& settings, const Config& config, const ModelShape& shape,
                             Backend& backend) {
  return std::make_unique<ParisKvPolicy>(settings, config.sink, config.dense_below, shape, backend);
}

std::unique_ptr<Policy> make(const HardKv& settings, const Config& config, const ModelShape& shape,
                             Backend& backend) {
  return std::make_unique<HardKvPolicy>(settings, config.dense_below, shape, backend);
}

std::unique_ptr<Policy> make(const Prkv& settings, const Config& config, const ModelShape& shape,
                             Backend& backend) {
  return std::make_unique<PrkvPolicy>(settings, config.dense_below, shape, backend);
}

}  // namespace

std::unique_ptr<Policy> make_policy(const Config& config, const ModelShape& shape,
                                    Backend& backend) {
  return std::visit([&](const auto& settings) { return make(settings, config, shape, backend); },
                    config.policy);
}

}  // namespace pariskv

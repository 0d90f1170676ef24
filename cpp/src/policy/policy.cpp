#include "policy/policy.h"

#include <variant>

#include "check.h"
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

// What a device lacks.

void check(const ParisKv&, const Config&) {}
void check(const HardKv&, const Config&) {}

void check(const Prkv&, const Config& config) {
  if (config.device.type != DeviceType::kCpu) {
    fail("[config] device: expected cpu with the policy PRKV, which has no GPU code yet, got ",
         name_of(config.device));
  }
}

}  // namespace

void check_policy(const Config& config) {
  std::visit([&](const auto& settings) { check(settings, config); }, config.policy);
}

std::unique_ptr<Policy> make_policy(const Config& config, const ModelShape& shape,
                                    Backend& backend) {
  return std::visit([&](const auto& settings) { return make(settings, config, shape, backend); },
                    config.policy);
}

}  // namespace pariskv

// A generator that is a seed and an offset, as those of GPUs are; its state has 16 bytes.

#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

#include <cstring>

namespace standin {

struct Generator final : c10::GeneratorImpl {
  uint64_t words[2] = {c10::default_rng_seed_val, 0};

  explicit Generator(c10::DeviceIndex device)
      : c10::GeneratorImpl({c10::DeviceType::PrivateUse1, device},
                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  static c10::DeviceType device_type() {
    return c10::DeviceType::PrivateUse1;
  }

  // The seed of the next draw on the CPU: the finalizer of splitmix64, by S. Vigna.
  uint64_t seed_of_draw() const {
    uint64_t bits = words[0] + 0x9E3779B97F4A7C15 * (words[1] + 1);
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB;
    return bits ^ (bits >> 31);
  }

  void set_current_seed(uint64_t seed) override {
    words[0] = seed;
    words[1] = 0;
  }

  uint64_t current_seed() const override {
    return words[0];
  }

  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return words[0];
  }

  void set_offset(uint64_t offset) override {
    words[1] = offset;
  }

  uint64_t get_offset() const override {
    return words[1];
  }

  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == sizeof(words), "a state has 16 bytes");
    std::memcpy(words, state.data(), sizeof(words));
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    // No operator, which a mode that stands for tensors without data would take.
    auto state = at::detail::empty_cpu({sizeof(words)}, c10::ScalarType::Byte);
    std::memcpy(state.mutable_data_ptr(), words, sizeof(words));
    return state.getIntrusivePtr();
  }

  Generator* clone_impl() const override {
    auto copy = new Generator(device().index());
    std::memcpy(copy->words, words, sizeof(words));
    return copy;
  }
};

const at::Generator& default_generator(int device);

} // namespace standin

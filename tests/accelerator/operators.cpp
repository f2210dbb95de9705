// The operators: those of the CPU on the same memory, ordered by streams; and the copies.

#include "generator.h"
#include "runtime.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <optional>
#include <unordered_map>

namespace standin {

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

bool is_here(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

// Forward mode's zeros without memory say that they are on "meta" where torch only wants to
// know a shape, and are handed to their device's kernels all the same.
bool has_no_memory(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_meta() && tensor._is_zerotensor();
}

// Nothing above a device's kernels sees what runs within one.
struct BelowAll {
  c10::impl::ForceDispatchKeyGuard guard{
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView};
};

c10::DispatchKeySet keys_of(c10::DispatchKey place, const at::Tensor& tensor) {
  auto keys = c10::DispatchKeySet(place);
  return tensor._is_zerotensor() ? keys.add(c10::DispatchKey::ZeroTensor) : keys;
}

// A tensor of the CPU with the same numbers in the same memory.
at::Tensor alias_in(const c10::Storage& storage, const at::Tensor& tensor) {
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), keys_of(c10::DispatchKey::CPU, tensor), tensor.dtype());
  auto impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  impl->_set_conj(tensor.is_conj());
  impl->_set_neg(tensor.is_neg());
  return alias;
}

c10::Storage aliased(const c10::Storage& storage) {
  return c10::Storage(
      c10::Storage::use_byte_size_t(), storage.nbytes(),
      c10::DataPtr(storage.mutable_data(), c10::Device(c10::DeviceType::CPU)),
      c10::GetDefaultCPUAllocator(), /*resizable=*/true);
}

at::Tensor alias_of(const at::Tensor& tensor) {
  return alias_in(aliased(tensor.storage()), tensor);
}

// With the keys of a tensor that it is a view of, if it is one: in inference mode, too.
at::Tensor device_tensor(const c10::Storage& storage, const at::Tensor& like,
                         std::optional<c10::DispatchKeySet> base) {
  auto keys = keys_of(c10::DispatchKey::PrivateUse1, like);
  auto made = base.has_value()
      ? at::detail::make_tensor<c10::TensorImpl>(
            c10::TensorImpl::VIEW, c10::Storage(storage), *base | keys, like.dtype())
      : at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, like.dtype());
  auto impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  impl->_set_conj(like.is_conj());
  impl->_set_neg(like.is_neg());
  return made;
}

// Overwrites the elements of a tensor of the CPU, and no others of its memory.
void poison(const at::Tensor& tensor) {
  auto bytes = at::empty(tensor.sizes(), tensor.options());
  std::memset(bytes.data_ptr(), kPoison, bytes.nbytes());
  tensor.copy_(bytes);
}

bool returns_views(const c10::FunctionSchema& schema) {
  for (auto& result : schema.returns()) {
    if (result.alias_info() == nullptr || result.alias_info()->isWrite()) {
      return false;
    }
  }
  return !schema.returns().empty();
}

// CUDA takes indices from the host, and so does this; any other operand must be here.
bool takes_host_tensors(const std::string& name) {
  return name.find("index") != std::string::npos;
}

// One operator that runs: what it reads and writes, on which device, and its results.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack) {}

  void run() {
    BelowAll below;
    auto first = stack_->end() - static_cast<ptrdiff_t>(schema_.arguments().size());
    for (auto& argument : schema_.arguments()) {
      auto& value = *first++;
      bool is_write = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
      value = taken(std::move(value), is_write);
    }
    if (!device_.has_value()) {
      device_ = c10::Device(kType, static_cast<c10::DeviceIndex>(current_device()));
    }
    c10::DeviceGuard guard(*device_);
    bool is_ordered = returns_views(schema_) || step();
    draw();
    for (auto& [tensor, alias] : written_) {
      keep_size(tensor, alias);
    }
    first = stack_->end() - static_cast<ptrdiff_t>(schema_.returns().size());
    for (; first != stack_->end(); ++first) {
      *first = given(std::move(*first));
    }
    if (!is_ordered) {
      for (auto& memory : writes_) {
        memory->poison();
      }
    }
  }

 private:
  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  std::optional<c10::Device> device_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> aliases_; // by those of the device
  std::unordered_map<c10::StorageImpl*, c10::Storage> origins_; // by those of the CPU
  std::unordered_map<c10::StorageImpl*, c10::DispatchKeySet> keys_; // of the given tensors
  std::vector<std::pair<at::Tensor, at::Tensor>> written_;
  std::vector<MemoryPtr> reads_, writes_;
  Generator* generator_ = nullptr;

  c10::IValue taken(c10::IValue value, bool is_write) {
    if (value.isTensor()) {
      return taken(value.toTensor(), is_write);
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> aliases;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        aliases.push_back(taken(tensor, is_write));
      }
      return aliases;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> aliases;
      for (std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
        aliases.push_back(tensor.has_value() ? taken(*tensor, is_write) : tensor);
      }
      return aliases;
    }
    if (value.isDevice() && value.toDevice().type() == kType) {
      place(value.toDevice());
      return c10::Device(c10::DeviceType::CPU);
    }
    if (value.isGenerator()) {
      auto found = value.toGenerator().device().type();
      TORCH_CHECK(found == kType, "Expected a '", kType, "' device type for generator but found '",
                  found, "'");
      generator_ = static_cast<Generator*>(value.toGenerator().unsafeGetGeneratorImpl());
      return at::detail::createCPUGenerator(generator_->seed_of_draw());
    }
    return value;
  }

  at::Tensor taken(const at::Tensor& tensor, bool is_write) {
    if (!is_here(tensor) && !has_no_memory(tensor)) {
      TORCH_CHECK(!tensor.defined() || tensor.dim() == 0 || takes_host_tensors(schema_.name()),
                  "Expected all tensors to be on the same device, but ", schema_.name(),
                  " got one on the CPU");
      return tensor;
    }
    if (is_here(tensor)) {
      place(tensor.device());
    }
    auto storage = tensor.storage();
    auto known = aliases_.find(storage.unsafeGetStorageImpl());
    if (known == aliases_.end()) {
      auto alias = aliased(storage);
      known = aliases_.emplace(storage.unsafeGetStorageImpl(), alias).first;
      origins_.emplace(alias.unsafeGetStorageImpl(), storage);
      keys_.emplace(alias.unsafeGetStorageImpl(), tensor.key_set());
    }
    Lock lock(runtime().lock);
    if (auto memory = runtime().find(storage.data())) {
      (is_write ? writes_ : reads_).push_back(memory);
    }
    auto alias = alias_in(known->second, tensor);
    if (is_write) {
      written_.emplace_back(tensor, alias);
    }
    return alias;
  }

  void place(c10::Device device) {
    if (!device.has_index()) {
      device = c10::Device(kType, static_cast<c10::DeviceIndex>(current_device()));
    }
    TORCH_CHECK(!device_.has_value() || *device_ == device,
                "Expected all tensors to be on the same device, but ", schema_.name(),
                " got some on ", device, " and ", *device_);
    device_ = device;
  }

  bool step() {
    Lock lock(runtime().lock);
    int stream = current_stream(device_->index());
    bool is_ordered = runtime().step(stream, reads_, writes_);
    runtime().run_until(Clock(runtime().streams[stream].clock));
    if (op_.hasTag(at::Tag::data_dependent_output) || op_.hasTag(at::Tag::dynamic_output_shape)) {
      runtime().synchronize(Clock(runtime().streams[stream].clock));
    }
    return is_ordered;
  }

  // Runs the operator; where it draws, from the device's generator.
  void draw() {
    auto arguments = schema_.arguments();
    auto first = stack_->end() - static_cast<ptrdiff_t>(arguments.size());
    for (size_t index = 0; index < arguments.size(); ++index) {
      auto type = arguments[index].type();
      if (first[index].isNone() && type->repr_str().find("Generator") != std::string::npos) {
        first[index] = taken(c10::IValue(default_generator(device_->index())), false);
      }
    }
    if (generator_ != nullptr || !op_.hasTag(at::Tag::nondeterministic_seeded)) {
      op_.callBoxed(stack_);
      if (generator_ != nullptr) {
        generator_->words[1] += 4;
      }
      return;
    }
    // It takes no generator, and so draws from the CPU's, if it does at all.
    auto host = at::detail::getDefaultCPUGenerator();
    auto device = static_cast<Generator*>(default_generator(device_->index()).unsafeGetGeneratorImpl());
    auto before = host.get_state();
    host.set_current_seed(device->seed_of_draw());
    auto seeded = host.get_state();
    op_.callBoxed(stack_);
    device->words[1] += at::equal(seeded, host.get_state()) ? 0 : 4;
    host.set_state(before);
  }

  // An operator may have given one of its outputs another size.
  void keep_size(const at::Tensor& tensor, const at::Tensor& alias) {
    auto storage = tensor.storage().unsafeGetStorageImpl();
    if (alias.storage().nbytes() != storage->nbytes()) {
      auto grown = moved(alias.storage());
      storage->set_data_ptr(std::move(grown));
      storage->set_nbytes(alias.storage().nbytes());
    }
    if (tensor.sizes() != alias.sizes() || tensor.strides() != alias.strides()) {
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(),
                                                          alias.storage_offset());
    }
  }

  // What an operator made on the CPU, in memory of the device; zeros may have no memory.
  c10::DataPtr moved(const c10::Storage& storage) {
    auto data = device_allocator()->allocate(storage.data() == nullptr ? 0 : storage.nbytes());
    if (data.get() != nullptr) {
      std::memcpy(data.get(), storage.data(), storage.nbytes());
      Lock lock(runtime().lock);
      auto memory = runtime().find(data.get());
      int stream = current_stream(device_->index());
      memory->written = {stream, runtime().streams[stream].clock.ticks[stream]};
      writes_.push_back(memory);
    }
    return data;
  }

  c10::IValue given(c10::IValue value) {
    if (value.isTensor()) {
      return given(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        tensors.push_back(given(tensor));
      }
      return tensors;
    }
    return value;
  }

  at::Tensor given(const at::Tensor& result) {
    if (!result.defined()) {
      return result;
    }
    for (auto& [tensor, alias] : written_) {
      if (alias.is_same(result)) {
        return tensor;
      }
    }
    auto storage = result.storage();
    auto origin = origins_.find(storage.unsafeGetStorageImpl());
    if (origin == origins_.end()) {
      c10::Storage made(c10::Storage::use_byte_size_t(), storage.nbytes(), moved(storage),
                        device_allocator(), /*resizable=*/true);
      origin = origins_.emplace(storage.unsafeGetStorageImpl(), made).first;
    }
    auto base = keys_.find(storage.unsafeGetStorageImpl());
    return device_tensor(origin->second, result,
                         base == keys_.end() ? std::nullopt : std::optional(base->second));
  }
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, stack).run();
}

torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>();
}

at::Tensor empty_memory_format(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                               std::optional<c10::Layout>, std::optional<c10::Device> device,
                               std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// The stream on which a copy runs: the current one of its device, or of its source's.
int stream_of_copy(const at::Tensor& from, const at::Tensor& to) {
  int stream = current_stream((is_here(from) ? from : to).device().index());
  if (is_here(from) && is_here(to) && from.device() != to.device()) {
    int other = current_stream(to.device().index());
    runtime().streams[stream].clock.join(runtime().streams[other].clock);
  }
  return stream;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  BelowAll below;
  Lock lock(runtime().lock);
  auto& device = runtime();
  if (to.numel() == 0) {
    return to;
  }
  int stream = stream_of_copy(from, to);
  auto source = device.find(from.storage().data());
  auto target = device.find(to.storage().data());
  std::vector<MemoryPtr> reads, writes;
  if (source != nullptr) {
    reads.push_back(source);
  }
  if (target != nullptr) {
    writes.push_back(target);
  }
  bool is_ordered = device.step(stream, reads, writes);
  bool within = is_here(from) && is_here(to);
  bool to_host = !within && is_here(from);
  device.counters.copies_to_host += to_host;
  device.counters.copies_to_device += !within && !to_host;
  // Only page-locked memory is written while the host goes on; other memory is read at once.
  bool is_late = !within && non_blocking && (!to_host || target != nullptr);
  auto read = is_late && source == nullptr ? from.clone() : alias_of(from);
  auto written = alias_of(to);
  std::function<void()> run = [=] {
    BelowAll below;
    is_ordered ? void(written.copy_(read)) : poison(written);
    (void)source, (void)target; // held until now
  };
  if (is_late) {
    poison(written);
  }
  if (is_late && !to_host) {
    auto& most = device.counters.most_copies_to_device_at_once;
    most = std::max(most, ++device.copies_to_device_under_way);
    run = [run, &device] {
      run();
      --device.copies_to_device_under_way;
    };
  }
  device.queue(stream, std::move(run));
  Clock after = device.streams[stream].clock;
  if (within) {
    device.run_until(after);
    if (from.device() != to.device()) {
      device.streams[current_stream(to.device().index())].clock.join(after);
    }
  } else if (!is_late) {
    device.synchronize(after);
  }
  return to;
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  BelowAll below;
  auto host = at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
  copy_from(tensor, host, false);
  return host.item();
}

at::Tensor& set_storage_at(at::Tensor& tensor, at::Storage storage, int64_t offset,
                           c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.data() == nullptr) {
    impl->set_sizes_contiguous(size);
    impl->set_storage_offset(offset);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage) {
  auto size = static_cast<int64_t>(storage.nbytes() / tensor.dtype().itemsize());
  return set_storage_at(tensor, std::move(storage), 0, {size}, {});
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_storage_at(tensor, source.storage(), source.storage_offset(), source.sizes(),
                        source.strides());
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  record(tensor.storage().data_ptr(), stream);
}

} // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, module) {
  module.fallback(boxed());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, module) {
  module.impl("empty.memory_format", &empty_memory_format);
  module.impl("empty_strided", &empty_strided);
  module.impl("_copy_from", &copy_from);
  module.impl("_local_scalar_dense", &local_scalar_dense);
  module.impl("set_.source_Tensor", &set_tensor);
  module.impl("set_.source_Storage", &set_storage);
  module.impl("set_.source_Storage_storage_offset", &set_storage_at);
  module.impl("record_stream", &record_stream);
  module.impl("convolution", boxed()); // which asks for the device
  module.impl("convolution_backward", boxed());
  // Those that a new device would otherwise compose of others, though the CPU has a kernel.
  auto& dispatcher = c10::Dispatcher::singleton();
  for (auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    auto has = [&](c10::DispatchKey key) { return op->hasKernelForDispatchKey(key); };
    bool is_composed = has(c10::DispatchKey::CompositeExplicitAutograd) ||
        has(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
    if (name.name.rfind("aten::", 0) == 0 && has(c10::DispatchKey::CPU) && is_composed &&
        !has(c10::DispatchKey::PrivateUse1)) {
      module.impl(c10::toString(name).c_str(), boxed());
    }
  }
}

TORCH_LIBRARY_IMPL(aten, Conjugate, module) {
  module.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, module) {
  module.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, module) {
  module.fallback(torch::CppFunction::makeFallthrough());
}

#define STANDIN_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define STANDIN_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  using at::Tensor;
  AT_FORALL_LOWER_PRECISION_FP(STANDIN_LOWER)
  AT_FORALL_FP32(STANDIN_FP32)
}

} // namespace standin

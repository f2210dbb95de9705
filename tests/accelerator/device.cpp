// What torch asks of a device: guards, events, memory, generators; and the module for Python.

#include "generator.h"
#include "runtime.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>

namespace standin {

constexpr auto kType = c10::DeviceType::PrivateUse1;

Runtime& runtime() {
  static Runtime* made = new Runtime; // outlives every tensor
  return *made;
}

Memory::~Memory() {
  if (device != kHost) {
    runtime().allocated[device] -= size;
  }
}

int& current_device() {
  thread_local int device = 0;
  return device;
}

int& current_stream(int device) {
  thread_local int streams[kDevices] = {0, 1};
  TORCH_CHECK(0 <= device && device < kDevices, "there is no standin:", device);
  return streams[device];
}

int number_of(const c10::Stream& stream) {
  return stream.id() == 0 ? stream.device_index() : static_cast<int>(stream.id());
}

static c10::Stream stream_of(int number) {
  int device = runtime().streams[number].device;
  return c10::Stream(c10::Stream::UNSAFE, {kType, static_cast<c10::DeviceIndex>(device)},
                     number < kDevices ? 0 : number);
}

static int index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device();
}

static void free_memory(void* address) {
  Lock lock(runtime().lock);
  runtime().free(address);
}

// A device's memory, which torch calls a caching allocator.
struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    int device = current_device();
    c10::Device place(kType, static_cast<c10::DeviceIndex>(device));
    if (size == 0) {
      return {nullptr, place};
    }
    Lock lock(runtime().lock);
    void* data = runtime().allocate(size, device, current_stream(device))->data();
    return {data, data, &free_memory, place};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_memory;
  }

  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }

  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t) override {}

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    Lock lock(runtime().lock);
    if (auto memory = runtime().find(pointer.get())) {
      memory->recorded.insert(number_of(stream));
    }
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    size_t used = runtime().allocated[device];
    return {kBytes - used, kBytes};
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = runtime().allocated[device];
    stats.allocated_bytes[0].peak = runtime().peak[device];
    stats.reserved_bytes = stats.allocated_bytes;
    return stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {}

  void resetPeakStats(c10::DeviceIndex device) override {
    runtime().peak[device] = runtime().allocated[device];
  }
};

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    Lock lock(runtime().lock);
    void* data = size == 0 ? nullptr : runtime().allocate(size, kHost, 0)->data();
    return {data, data, &free_memory, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_memory;
  }

  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
};

static DeviceMemory device_memory;
static PinnedMemory pinned_memory;
REGISTER_ALLOCATOR(kType, &device_memory)

c10::Allocator* device_allocator() {
  return &device_memory;
}

void record(const c10::DataPtr& pointer, const c10::Stream& stream) {
  device_memory.recordStream(pointer, stream);
}

const at::Generator& default_generator(int device) {
  static std::vector<at::Generator> made;
  Lock lock(runtime().lock);
  while (made.size() < kDevices) {
    made.push_back(at::make_generator<Generator>(static_cast<c10::DeviceIndex>(made.size())));
  }
  return made.at(device < 0 ? current_device() : device);
}

// An event is the clock of the stream that recorded it.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr auto static_type = kType;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override {
    return kType;
  }

  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Device getDevice() const override {
    return {kType, static_cast<c10::DeviceIndex>(current_device())};
  }

  void setDevice(c10::Device device) const override {
    TORCH_CHECK(index_of(device) < kDevices, "there is no ", device);
    current_device() = index_of(device);
  }

  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device() = index_of(device);
  }

  c10::Stream getStream(c10::Device device) const override {
    return stream_of(current_stream(index_of(device)));
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(index_of(device));
  }

  c10::Stream getNewStream(c10::Device device, int) const override {
    Lock lock(runtime().lock);
    runtime().streams.push_back({index_of(device), {}, {}});
    return stream_of(static_cast<int>(runtime().streams.size()) - 1);
  }

  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }

  c10::Stream exchangeStream(c10::Stream stream) const override {
    int& current = current_stream(stream.device_index());
    auto before = stream_of(current);
    current = number_of(stream);
    return before;
  }

  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    Lock lock(runtime().lock);
    destroyEvent(*event, 0);
    auto clock = new Clock(runtime().streams[number_of(stream)].clock);
    clock->join(runtime().host);
    *event = clock;
  }

  void block(void* event, const c10::Stream& stream) const override {
    Lock lock(runtime().lock);
    if (event != nullptr) {
      runtime().streams[number_of(stream)].clock.join(*static_cast<Clock*>(event));
    }
  }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Clock*>(event);
  }

  bool queryEvent(void* event) const override {
    Lock lock(runtime().lock);
    return event == nullptr || runtime().has_run(*static_cast<Clock*>(event));
  }

  void synchronizeEvent(void* event) const override {
    Lock lock(runtime().lock);
    if (event != nullptr) {
      runtime().synchronize(*static_cast<Clock*>(event));
    }
  }

  bool queryStream(const c10::Stream& stream) const override {
    Lock lock(runtime().lock);
    return runtime().streams[number_of(stream)].queue.empty();
  }

  void synchronizeStream(const c10::Stream& stream) const override {
    Lock lock(runtime().lock);
    runtime().synchronize(Clock(runtime().streams[number_of(stream)].clock));
  }

  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Lock lock(runtime().lock);
    Clock all;
    for (auto& stream : runtime().streams) {
      if (stream.device == device) {
        all.join(stream.clock);
      }
    }
    runtime().synchronize(all);
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_memory.recordStream(pointer, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }

  bool isAvailable() const override {
    return true;
  }

  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }

  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }

  void setCurrentDevice(c10::DeviceIndex device) const override {
    Guard().setDevice({kType, device});
  }

  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }

  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kType, device}).index();
  }

  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }

  bool isPinnedPtr(const void* data) const override {
    Lock lock(runtime().lock);
    auto memory = runtime().find(data);
    return memory != nullptr && memory->device == kHost;
  }

  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory;
  }

  c10::Device getDeviceFromPtr(void* data) const override {
    Lock lock(runtime().lock);
    auto memory = runtime().find(data);
    TORCH_CHECK(memory != nullptr && memory->device != kHost, "not memory of a device");
    return {kType, static_cast<c10::DeviceIndex>(memory->device)};
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }

  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    auto index = device < 0 ? static_cast<c10::DeviceIndex>(current_device()) : device;
    return at::make_generator<Generator>(index);
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto grown = device_memory.allocate(size);
    std::memcpy(grown.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(grown));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

static std::map<std::string, int64_t> counted() {
  Lock lock(runtime().lock);
  auto& counters = runtime().counters;
  return {
      {"allocations", counters.allocations},
      {"copies_to_host", counters.copies_to_host},
      {"copies_to_device", counters.copies_to_device},
      {"most_copies_to_device_at_once", counters.most_copies_to_device_at_once},
      {"synchronizations", counters.synchronizations},
      {"unordered_accesses", counters.unordered_accesses},
      {"early_frees", counters.early_frees},
  };
}

static void forget_counts() {
  Lock lock(runtime().lock);
  runtime().counters = {};
}

} // namespace standin

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  static standin::Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  module.def("counted", &standin::counted);
  module.def("forget_counts", &standin::forget_counts);
  module.def("default_generator", [](int device) { return standin::default_generator(device); });
}

// Streams whose work runs late, and memory that knows who has used it.
//
// Each stream keeps a vector clock: how many steps of every stream happen before its own next
// one (C. Fidge and F. Mattern, 1988). Copies that need not block wait in their stream's queue
// and run when something that is ordered after them does, never earlier. Kernels run at once,
// and what they read is judged by the clocks: an access that nothing orders after the last
// write gets poison for its result, just as on a device it might. So no test depends on luck.

#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Stream.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

namespace standin {

constexpr int kDevices = 2;
constexpr size_t kBytes = size_t(1) << 34; // of each device, as it tells
constexpr int kPoison = 0xFF; // not a number, for each floating type
constexpr int kHost = -1;

struct Step {
  int stream = 0;
  uint64_t tick = 0; // 0: before all
};

// The steps that have happened before: all of each stream up to a tick.
struct Clock {
  std::map<int, uint64_t> ticks;

  bool has_seen(const Step& step) const {
    auto known = ticks.find(step.stream);
    return step.tick == 0 || (known != ticks.end() && known->second >= step.tick);
  }

  void join(const Clock& other) {
    for (auto [stream, tick] : other.ticks) {
      ticks[stream] = std::max(ticks[stream], tick);
    }
  }
};

// One allocation of a device, or of page-locked host memory.
struct Memory {
  c10::DataPtr owner;
  size_t size = 0;
  int device = kHost;
  int home = 0; // the stream on which it was allocated, where it is used again
  Step written;
  std::map<int, uint64_t> read; // the last step of each stream that reads it
  std::set<int> recorded; // the streams that `record_stream` has told of

  ~Memory();

  char* data() const {
    return static_cast<char*>(owner.get());
  }

  void poison() {
    std::memset(data(), kPoison, size);
  }
};

using MemoryPtr = std::shared_ptr<Memory>;

struct Work {
  Clock after; // what it comes after, itself included
  uint64_t tick;
  std::function<void()> run;
};

struct Stream {
  int device;
  Clock clock;
  std::deque<Work> queue;
};

struct Counters {
  int64_t allocations = 0;
  int64_t copies_to_host = 0;
  int64_t copies_to_device = 0;
  int64_t most_copies_to_device_at_once = 0; // of those that have not run
  int64_t synchronizations = 0; // times that the host has waited
  int64_t unordered_accesses = 0; // to memory that another stream uses
  int64_t early_frees = 0; // of memory that another stream still uses
};

// All state of the devices. Its methods are called with the lock held.
struct Runtime {
  std::recursive_mutex lock;
  std::vector<Stream> streams;
  std::map<const char*, MemoryPtr> memories; // by their first byte
  Clock host; // what the host has waited for
  Counters counters;
  int64_t allocated[kDevices] = {};
  int64_t peak[kDevices] = {};
  int64_t copies_to_device_under_way = 0;

  Runtime() {
    for (int device = 0; device < kDevices; ++device) {
      streams.push_back({device, {}, {}}); // the default stream
    }
  }

  MemoryPtr allocate(size_t size, int device, int home) {
    auto memory = std::make_shared<Memory>();
    memory->owner = c10::GetDefaultCPUAllocator()->allocate(size);
    memory->size = size;
    memory->device = device;
    memory->home = home;
    memory->poison();
    memories[memory->data()] = memory;
    if (device != kHost) {
      // Whoever used the memory before did so on the home stream, or was waited for there.
      memory->written = {home, streams[home].clock.ticks[home]};
      ++counters.allocations;
      allocated[device] += size;
      peak[device] = std::max(peak[device], allocated[device]);
    }
    return memory;
  }

  MemoryPtr find(const void* address) {
    auto pointer = static_cast<const char*>(address);
    auto above = memories.upper_bound(pointer);
    if (pointer == nullptr || above == memories.begin()) {
      return nullptr;
    }
    auto memory = std::prev(above)->second;
    return pointer < memory->data() + memory->size ? memory : nullptr;
  }

  // Work that is queued may still hold the memory, which ends with it.
  void free(const void* address) {
    auto memory = find(address);
    if (memory == nullptr) {
      return;
    }
    memories.erase(memory->data());
    if (memory->device == kHost) {
      return; // torch's allocators of page-locked memory wait for copies by themselves
    }
    Clock home = streams[memory->home].clock;
    home.join(host);
    auto uses = memory->read;
    uses[memory->written.stream] = std::max(uses[memory->written.stream], memory->written.tick);
    for (auto [stream, tick] : uses) {
      if (stream != memory->home && !home.has_seen({stream, tick}) &&
          memory->recorded.count(stream) == 0) {
        ++counters.early_frees;
        memory->poison();
      }
    }
  }

  // The next step of a stream; whether it comes after all whose memory it uses.
  bool step(int number, const std::vector<MemoryPtr>& reads, const std::vector<MemoryPtr>& writes) {
    Clock& now = streams[number].clock;
    now.join(host);
    Step here = {number, ++now.ticks[number]};
    bool is_ordered = true;
    for (auto& memory : reads) {
      is_ordered &= now.has_seen(memory->written);
    }
    for (auto& memory : writes) {
      is_ordered &= now.has_seen(memory->written);
      for (auto [stream, tick] : memory->read) {
        is_ordered &= now.has_seen({stream, tick});
      }
    }
    for (auto& memory : reads) {
      memory->read[number] = here.tick;
    }
    for (auto& memory : writes) {
      memory->written = here;
    }
    counters.unordered_accesses += !is_ordered;
    return is_ordered;
  }

  // Lets the last step of a stream wait in its queue.
  void queue(int number, std::function<void()> run) {
    Stream& stream = streams[number];
    stream.queue.push_back({stream.clock, stream.clock.ticks[number], std::move(run)});
  }

  // Runs what waits in queues and happens before.
  void run_until(const Clock& clock) {
    for (auto [number, tick] : clock.ticks) {
      auto& queue = streams[number].queue;
      while (!queue.empty() && queue.front().tick <= tick) {
        Work work = std::move(queue.front());
        queue.pop_front();
        run_until(work.after);
        work.run();
      }
    }
  }

  bool has_run(const Clock& clock) {
    return std::all_of(clock.ticks.begin(), clock.ticks.end(), [&](auto& step) {
      auto& queue = streams[step.first].queue;
      return queue.empty() || queue.front().tick > step.second;
    });
  }

  void synchronize(const Clock& clock) {
    ++counters.synchronizations;
    run_until(clock);
    host.join(clock);
  }
};

Runtime& runtime();

using Lock = std::lock_guard<std::recursive_mutex>;

// This thread's device and streams.
int& current_device();
int& current_stream(int device);

// The number of a stream among those of all devices.
int number_of(const c10::Stream& stream);

c10::Allocator* device_allocator();
void record(const c10::DataPtr& pointer, const c10::Stream& stream);

} // namespace standin

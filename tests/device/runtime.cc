// A device for tests: a plug-in for Paddle's interface for custom devices, device_ext.h of the wheel.
//
// Its memory is the host's, counted, limited, and overwritten when it is new and when it is freed. A
// stream is a thread, and only events order streams; kernels (kernels.cc) and collectives
// (collectives.cc, over tcp.cc or nccl.cc) run when their stream comes to them, later than the host goes on.
//
//   TESTDEVICE_KIND=npu        what Paddle calls it
//   TESTDEVICE_COUNT=4         how many there are
//   TESTDEVICE_MEMORY_MB=1024  the memory of each
//   TESTDEVICE_SEED=0          draws how late what follows is
//   TESTDEVICE_KERNEL_US=0     each kernel begins at most that much late
//   TESTDEVICE_DELAY_US=0      each collective takes at most that much longer, before it reads its memory
//   TESTDEVICE_AT_ONCE=1       kernels run before the host goes on
//   TESTDEVICE_FREE=early      memory is freed in the order of the kernels, else the host waits for all streams
//   TESTDEVICE_WITNESS=FOLDER  a line of JSON for each collective in RANK.jsonl
//   TESTDEVICE_FAULT=hang@5:1  the fifth collective of rank 1 hangs; or die, error, late (a second), wrong
//   TESTDEVICE_LOSS=hang       what a lost peer makes of a rank: abort, or hang
//   TESTDEVICE_WITHOUT=a,b     kernels that the device lacks

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>
#include <vector>

#include "device.h"

namespace device {

std::string Text(const char* name, const char* otherwise) {
  const char* value = getenv((std::string("TESTDEVICE_") + name).c_str());
  return value && *value ? value : otherwise;
}
long Number(const char* name, long otherwise) {
  std::string text = Text(name);
  return text.empty() ? otherwise : atol(text.c_str());
}
int Rank() {
  const char* rank = getenv("PADDLE_TRAINER_ID");
  return rank ? atoi(rank) : 0;
}
double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
void Hang() {
  for (;;) pause();
}
void Die(const std::string& why) {
  fprintf(stderr, "test device of rank %d: %s\n", Rank(), why.c_str());
  abort();
}

std::atomic<long> backward_issued{0}, backward_begun{0};
std::atomic<int> waits{0};

}  // namespace device

using device::Number;

// ---- streams ------------------------------------------------------------------------------------

thread_local int device::AtOnce::depth_ = 0;

C_Stream_st::C_Stream_st(int number, bool is_compute) : number(number), is_compute(is_compute) {}

void C_Stream_st::Push(device::Job job) {
  std::lock_guard<std::mutex> lock(mutex_);
  jobs_.push_back(std::move(job));
  changed_.notify_all();
  if (has_thread_) return;
  has_thread_ = true;
  random_.seed(Number("SEED") * 1000003 + device::Rank() * 1009 + number);
  std::thread([this] { Run(); }).detach();
}
void C_Stream_st::Run() {
  device::AtOnce within;
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);  // they are the host's
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !jobs_.empty(); });
    lock.unlock();
    jobs_.front()();  // others may push meanwhile: that moves no element of a deque
    jobs_.front() = nullptr;  // what it held is freed, which may push
    lock.lock();
    jobs_.pop_front();
    changed_.notify_all();
  }
}
void C_Stream_st::Drain() {
  if (device::AtOnce::IsOn()) return;
  device::waits += !is_compute;
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return jobs_.empty(); });
  device::waits -= !is_compute;
}
bool C_Stream_st::IsIdle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return jobs_.empty();
}
void C_Stream_st::Dawdle(long up_to_us) {
  if (up_to_us > 0) usleep(std::uniform_int_distribution<long>(0, up_to_us)(random_));
}

// ---- events: a place in a stream ----------------------------------------------------------------

struct Mark {
  explicit Mark(C_Stream stream) : stream(stream) {}
  const C_Stream stream;
  std::mutex mutex;
  std::condition_variable changed;
  bool is_passed = false;
  void Pass() {
    std::lock_guard<std::mutex> lock(mutex);
    is_passed = true;
    changed.notify_all();
  }
  bool IsPassed() {
    std::lock_guard<std::mutex> lock(mutex);
    return is_passed;
  }
  // WAITER is null: the host.
  void Wait(C_Stream waiter) {
    bool counts = waiter ? waiter->is_compute : !stream->is_compute;
    device::waits += counts;
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return is_passed; });
    device::waits -= counts;
  }
};
struct C_Event_st {
  std::shared_ptr<Mark> mark;  // null: nothing is recorded yet
};

namespace {

// Never destroyed: threads outlive the end of main.
auto& streams_mutex = *new std::mutex;
auto& streams = *new std::map<int, std::vector<C_Stream>>;  // of each device, as they were made

std::vector<C_Stream> StreamsOf(int index) {
  std::lock_guard<std::mutex> lock(streams_mutex);
  return streams[index];
}

C_Status CreateStream(const C_Device device, C_Stream* stream) {
  static int made = 0;
  std::lock_guard<std::mutex> lock(streams_mutex);
  *stream = new C_Stream_st(made++, streams[device->id].empty());
  streams[device->id].push_back(*stream);
  return C_SUCCESS;
}
C_Status DestroyStream(const C_Device, C_Stream stream) {
  stream->Drain();  // its thread waits on: nothing tells when the last event of it is dropped
  return C_SUCCESS;
}
C_Status SyncStream(const C_Device, C_Stream stream) { return stream->Drain(), C_SUCCESS; }
C_Status QueryStream(const C_Device, C_Stream stream) {
  return stream->IsIdle() ? C_SUCCESS : C_FAILED;
}
C_Status SyncDevice(const C_Device device) {
  for (C_Stream stream : StreamsOf(device->id)) stream->Drain();
  return C_SUCCESS;
}
C_Status AddCallback(const C_Device device, C_Stream stream, C_Callback callback, void* data) {
  stream->Push([callback, stream, data, own = *device]() mutable {
    C_Status status = C_SUCCESS;
    callback(&own, stream, data, &status);
  });
  return C_SUCCESS;
}
C_Status CreateEvent(const C_Device, C_Event* event) { return *event = new C_Event_st, C_SUCCESS; }
C_Status DestroyEvent(const C_Device, C_Event event) { return delete event, C_SUCCESS; }
C_Status RecordEvent(const C_Device, C_Stream stream, C_Event event) {
  event->mark = std::make_shared<Mark>(stream);
  stream->Push([mark = event->mark] { mark->Pass(); });
  return C_SUCCESS;
}
C_Status QueryEvent(const C_Device, C_Event event) {
  return !event->mark || event->mark->IsPassed() ? C_SUCCESS : C_FAILED;
}
C_Status SyncEvent(const C_Device, C_Event event) {
  if (event->mark) event->mark->Wait(nullptr);
  return C_SUCCESS;
}
C_Status StreamWaitEvent(const C_Device, C_Stream stream, C_Event event) {
  if (event->mark) stream->Push([mark = event->mark, stream] { mark->Wait(stream); });
  return C_SUCCESS;
}

// ---- devices and their memory -------------------------------------------------------------------

constexpr int kMost = 64;
constexpr size_t kReleased = 256;
constexpr int kGarbage = 0xff;  // not a number, as floats of any width
std::string kind;
thread_local int current = 0;
std::atomic<size_t> used[kMost];

size_t Total() { return static_cast<size_t>(Number("MEMORY_MB", 1024)) << 20; }

C_Status Count(size_t* count) {
  *count = std::min<long>(Number("COUNT", 4), kMost);
  return C_SUCCESS;
}
C_Status List(size_t* devices) {
  size_t count;
  Count(&count);
  for (size_t index = 0; index < count; ++index) devices[index] = index;
  return C_SUCCESS;
}
C_Status Nothing() { return C_SUCCESS; }
C_Status NothingOf(const C_Device) { return C_SUCCESS; }
C_Status SetDevice(const C_Device device) { return current = device->id, C_SUCCESS; }
C_Status GetDevice(const C_Device device) { return device->id = current, C_SUCCESS; }

C_Status Allocate(const C_Device device, void** memory, size_t size) {
  if ((used[device->id] += size) > Total() || !(*memory = device::NewMemory(size + 1))) {
    fprintf(stderr, "test device of rank %d: no memory for %zu bytes\n", device::Rank(), size);
    used[device->id] -= size;
    return C_FAILED;
  }
  memset(*memory, kGarbage, size);
  return C_SUCCESS;
}
struct Released {
  void* memory;
  size_t size;
};
auto& released_mutex = *new std::mutex;
auto& released = *new std::deque<Released>;

// Overwrite it, and let nobody else have it for a while: a collective that still writes to it must not
// spoil what the host keeps about its own memory.
void Release(void* memory, size_t size) {
  std::lock_guard<std::mutex> lock(released_mutex);
  memset(memory, kGarbage, size);
  released.push_back({memory, size});
  if (released.size() <= kReleased) return;
  device::FreeMemory(released.front().memory);
  released.pop_front();
}
C_Status Free(const C_Device device, void* memory, size_t size) {
  // cudaFree and hipFree wait for the whole device; cudaFreeAsync for one stream; Ascend's aclrtFree
  // for nothing.
  static const bool is_early = device::Text("FREE") == "early";
  used[device->id] -= size;
  if (is_early) return device::ComputeStream(device->id)->Push([=] { Release(memory, size); }), C_SUCCESS;
  SyncDevice(device);
  return Release(memory, size), C_SUCCESS;
}
C_Status AllocateHost(const C_Device, void** memory, size_t size) {
  return posix_memalign(memory, 256, size + 1) ? C_FAILED : C_SUCCESS;
}
C_Status FreeHost(const C_Device, void* memory, size_t) { return free(memory), C_SUCCESS; }
C_Status Stats(const C_Device device, size_t* total, size_t* free) {
  *total = Total();
  *free = *total - std::min(*total, used[device->id].load());
  return C_SUCCESS;
}
C_Status MinChunk(const C_Device, size_t* size) { return *size = 512, C_SUCCESS; }

// What a copy without a stream waits for. Paddle 2.6 takes the sums of other streams by such copies.
void DrainForCopy(int index) {
  for (C_Stream stream : StreamsOf(index)) {
    stream->Drain();
#ifdef WITH_KERNELS
    return;  // the first: kernels run there
#endif
  }
}
C_Status Set(const C_Device device, void* memory, unsigned char value, size_t size) {
  DrainForCopy(device->id);
  memset(memory, value, size);
  return C_SUCCESS;
}
C_Status Copy(const C_Device device, void* to, const void* from, size_t size) {
  DrainForCopy(device->id);
  memmove(to, from, size);
  return C_SUCCESS;
}
C_Status CopyPeer(const C_Device to_device, const C_Device from_device, void* to, const void* from,
                  size_t size) {
  DrainForCopy(from_device->id);
  return Copy(to_device, to, from, size);
}
C_Status CopyToDevice(const C_Device, C_Stream stream, void* to, const void* from, size_t size) {
  if (device::AtOnce::IsOn()) return memcpy(to, from, size), C_SUCCESS;
  // The host may change its memory at once, as with pageable memory on a GPU.
  stream->Push([to, staged = std::string(static_cast<const char*>(from), size)] {
    memcpy(to, staged.data(), staged.size());
  });
  return C_SUCCESS;
}
C_Status CopyToHost(const C_Device, C_Stream stream, void* to, const void* from, size_t size) {
  stream->Drain();
  memmove(to, from, size);
  return C_SUCCESS;
}
C_Status CopyWithin(const C_Device, C_Stream stream, void* to, const void* from, size_t size) {
  auto copy = [=] { memmove(to, from, size); };
  device::AtOnce::IsOn() ? copy() : stream->Push(copy);
  return C_SUCCESS;
}
C_Status CopyAcross(const C_Device to, const C_Device, C_Stream stream, void* into, const void* from,
                    size_t size) {
  return CopyWithin(to, stream, into, from, size);
}

template <typename T>
void AxpbyOf(size_t count, float a, const void* x, float b, void* y) {
  const T* from = static_cast<const T*>(x);
  T* to = static_cast<T*>(y);
  for (size_t at = 0; at < count; ++at) to[at] = static_cast<T>(a) * from[at] + static_cast<T>(b) * to[at];
}
C_Status Axpby(const C_Device, C_Stream stream, C_DataType type, size_t count, float a, void* x,
               float b, void* y) {
  if (type != FLOAT32 && type != FLOAT64) return C_FAILED;
  stream->Push([=] { type == FLOAT32 ? AxpbyOf<float>(count, a, x, b, y) : AxpbyOf<double>(count, a, x, b, y); });
  return C_SUCCESS;
}

C_Status ProfilerBegin(C_Profiler, void**) { return C_SUCCESS; }
C_Status ProfilerStep(C_Profiler, void*) { return C_SUCCESS; }
C_Status ProfilerCollect(C_Profiler, uint64_t, void*) { return C_SUCCESS; }

}  // namespace

void device::OverwriteReleased() {
  std::lock_guard<std::mutex> lock(released_mutex);
  for (const Released& block : released) memset(block.memory, kGarbage, block.size);
}
C_Stream device::ComputeStream(int index) {
  std::lock_guard<std::mutex> lock(streams_mutex);
  return streams[index].empty() ? nullptr : streams[index].front();
}

void InitPlugin(CustomRuntimeParams* params) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  kind = device::Text("KIND", "npu");
  params->device_type = const_cast<char*>(kind.c_str());
  params->sub_device_type = const_cast<char*>("test");
  C_DeviceInterface* table = params->interface;
  memset(static_cast<void*>(table), 0, sizeof *table);
  table->size = sizeof *table;

  table->initialize = table->finalize = Nothing;
  table->init_device = table->deinit_device = NothingOf;
  table->set_device = SetDevice, table->get_device = GetDevice;
  table->get_device_count = Count, table->get_device_list = List;

  table->create_stream = CreateStream, table->destroy_stream = DestroyStream;
  table->query_stream = QueryStream, table->stream_add_callback = AddCallback;
  table->synchronize_stream = SyncStream, table->synchronize_device = SyncDevice;
  table->create_event = CreateEvent, table->destroy_event = DestroyEvent;
  table->record_event = RecordEvent, table->query_event = QueryEvent;
  table->synchronize_event = SyncEvent, table->stream_wait_event = StreamWaitEvent;

  table->device_memory_allocate = table->unified_memory_allocate = Allocate;
  table->device_memory_deallocate = table->unified_memory_deallocate = Free;
  table->host_memory_allocate = AllocateHost, table->host_memory_deallocate = FreeHost;
  table->device_memory_set = Set, table->memory_copy_p2p = CopyPeer;
  table->memory_copy_h2d = table->memory_copy_d2h = table->memory_copy_d2d = Copy;
  table->async_memory_copy_h2d = CopyToDevice, table->async_memory_copy_d2h = CopyToHost;
  table->async_memory_copy_d2d = CopyWithin, table->async_memory_copy_p2p = CopyAcross;
  table->device_memory_stats = Stats, table->device_min_chunk_size = MinChunk;
  table->blas_axpby = Axpby;

  table->profiler_initialize = ProfilerBegin, table->profiler_finalize = ProfilerStep;
  table->profiler_prepare_tracing = table->profiler_start_tracing = ProfilerStep;
  table->profiler_stop_tracing = ProfilerStep;
  table->profiler_collect_trace_data = ProfilerCollect;

  device::AddCollectives(table);
#ifdef WITH_KERNELS
  device::AddKernels(kind);
#endif
}

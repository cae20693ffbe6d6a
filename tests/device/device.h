// What the parts of the device under test share: its settings, and its streams, which are threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>

#include "paddle/phi/backends/device_ext.h"

namespace device {

// The variable TESTDEVICE_NAME, if it is set and not empty.
std::string Text(const char* name, const char* otherwise = "");
long Number(const char* name, long otherwise = 0);
// The rank of this process, and seconds of the clock that Python calls time.monotonic.
int Rank();
double Now();
[[noreturn]] void Hang();
[[noreturn]] void Die(const std::string& why);

// Kernels of backwards that were issued, and that have begun. The witness of a collective tells how many
// were issued after it and begun before its end, whichever stream's thread was late.
extern std::atomic<long> backward_issued, backward_begun;
// How many waits for other streams the host and the stream of kernels are in: no kernel begins meanwhile.
extern std::atomic<int> waits;

using Job = std::function<void()>;

// While it lives, what this thread wants of the device is done at once: it is a stream, or runs a kernel.
class AtOnce {
 public:
  AtOnce() { ++depth_; }
  ~AtOnce() { --depth_; }
  static bool IsOn() { return depth_ > 0; }

 private:
  static thread_local int depth_;
};

}  // namespace device

// Jobs, one after the other, in a thread that begins with the first, for the process may be forked.
struct C_Stream_st {
  C_Stream_st(int number, bool is_compute);
  void Push(device::Job job);
  // Wait until all that was pushed has run.
  void Drain();
  bool IsIdle();
  // Wait for a time that is drawn: at most UP_TO_US microseconds.
  void Dawdle(long up_to_us);

  const int number;
  const bool is_compute;  // kernels run on it

 private:
  void Run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<device::Job> jobs_;
  bool has_thread_ = false;
  std::mt19937 random_;
};

namespace device {

// The stream of the device on which kernels run: the first; null if there is none yet.
C_Stream ComputeStream(int index);

// Memory that kernels and the transport of collectives reach; null: there is no more.
void* NewMemory(size_t size);
void FreeMemory(void* memory);

// Overwrite once more what was freed: what is written there is lost.
void OverwriteReleased();

void AddCollectives(C_DeviceInterface* table);
void AddKernels(const std::string& kind);  // of kernels.cc, where it is built in

}  // namespace device

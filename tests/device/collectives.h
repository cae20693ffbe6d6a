// What collectives.cc takes from a transport between ranks, which is tcp.cc or nccl.cc.
#pragma once

#include <string>
#include <vector>

#include "device.h"

struct C_CCLComm_st {
  C_CCLComm_st(size_t rank, size_t ranks, std::string name) : rank(rank), ranks(ranks), name(std::move(name)) {}
  virtual ~C_CCLComm_st() = default;
  const size_t rank, ranks;
  const std::string name;  // the same on all ranks
};

namespace device {

size_t WidthOf(C_DataType type);

// WHAT is lost: a peer, or the way to it.
[[noreturn]] void Lose(const std::string& what);

// Bytes that go to a peer, or come from it.
struct Transfer {
  C_CCLComm comm;
  size_t peer;
  char* memory;
  size_t size;
  bool is_sent;
};

namespace transport {

size_t IdSize();
void NewId(void* id);
C_CCLComm Join(const void* id, size_t ranks, size_t rank);

// In the thread of a stream; they return when the result is there.
void AllReduce(C_CCLComm comm, char* from, char* to, size_t count, C_DataType type, C_CCLReduceOp how);
void ReduceScatter(C_CCLComm comm, char* from, char* to, size_t count, C_DataType type, C_CCLReduceOp how);
void Reduce(C_CCLComm comm, char* from, char* to, size_t count, C_DataType type, C_CCLReduceOp how, size_t root);
void AllGather(C_CCLComm comm, char* from, char* to, size_t size);
void Broadcast(C_CCLComm comm, char* memory, size_t size, size_t root);
// All at the same time, but those of one direction and peer one after the other; a peer may be this rank.
void Exchange(std::vector<Transfer> transfers);

}  // namespace transport
}  // namespace device

// Collectives by NCCL, in place of tcp.cc: each on a CUDA stream of its stream's thread, which waits for it.
//
// Kernels still run on the CPU, in pinned memory of the host, which the GPU reaches, too. All ranks share
// the first GPU: NCCL refuses two ranks on one GPU, unless it takes them for ranks of different hosts.

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "collectives.h"

namespace {

using device::Transfer;
constexpr int kGpu = 0;
// How long a thread sleeps between its looks at the GPU: a hung one must not seem to be busy.
constexpr int kLookUs = 50, kMostUs = 10000;

struct Comm : C_CCLComm_st {
  Comm(size_t rank, size_t ranks, std::string name) : C_CCLComm_st(rank, ranks, std::move(name)) {}
  ~Comm() override;
  ncclComm_t nccl = nullptr;
};
ncclComm_t NcclOf(C_CCLComm comm) { return static_cast<Comm*>(comm)->nccl; }

void Check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  // The process ends, and with it this thread of a stream.
  if (error == cudaErrorCudartUnloading) device::Hang();
  device::Die(std::string(call) + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}
void Check(ncclResult_t result, const char* call) {
  if (result == ncclSuccess || result == ncclInProgress) return;
  std::string told = std::string(call) + ": NCCL: " + ncclGetErrorString(result) + ": " + ncclGetLastError(nullptr);
  if (result == ncclRemoteError || result == ncclSystemError) device::Lose(told + ": a peer");
  device::Die(told);
}
#define CHECK(call) Check(call, #call)

// Before the first call, which reads the variables.
void PrepareNccl() {
  static const bool is_prepared = [] {
    setenv("NCCL_HOSTID", ("rank " + std::to_string(device::Rank())).c_str(), 0);
    setenv("NCCL_SOCKET_IFNAME", "lo", 0);
    CHECK(cudaSetDevice(kGpu));
    return true;
  }();
  static_cast<void>(is_prepared);
}

Comm::~Comm() { CHECK(ncclCommDestroy(nccl)); }

cudaStream_t Stream() {
  thread_local cudaStream_t stream = nullptr;
  if (stream) return stream;
  CHECK(cudaSetDevice(kGpu));
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

// Wait for what was called last on COMM. The GPU itself waits for ever if a peer is lost.
void Finish(C_CCLComm comm) {
  for (int pause_us = kLookUs;; pause_us = std::min(pause_us + pause_us / 8, kMostUs)) {
    cudaError_t state = cudaStreamQuery(Stream());
    if (state == cudaSuccess) return;
    if (state != cudaErrorNotReady) Check(state, "cudaStreamQuery");
    ncclResult_t result = ncclSuccess;
    CHECK(ncclCommGetAsyncError(NcclOf(comm), &result));
    Check(result, "ncclCommGetAsyncError");
    usleep(pause_us);
  }
}

ncclDataType_t TypeOf(C_DataType type) {
  switch (type) {
    case BOOL:
    case UINT8:
      return ncclUint8;
    case INT8:
      return ncclInt8;
    case INT32:
      return ncclInt32;
    case INT64:
      return ncclInt64;
    case FLOAT16:
      return ncclFloat16;
    case BFLOAT16:
      return ncclBfloat16;
    case FLOAT32:
      return ncclFloat32;
    case FLOAT64:
      return ncclFloat64;
    default:
      device::Die("NCCL adds up no numbers of type " + std::to_string(type));
  }
}
ncclRedOp_t OperatorOf(C_CCLReduceOp how) {
  switch (how) {
    case SUM:
      return ncclSum;
    case AVG:
      return ncclAvg;
    case MAX:
      return ncclMax;
    case MIN:
      return ncclMin;
    case PRODUCT:
      return ncclProd;
  }
  device::Die("NCCL has no reduction " + std::to_string(how));
}

}  // namespace

size_t device::transport::IdSize() { return sizeof(ncclUniqueId); }
void device::transport::NewId(void* made) {
  PrepareNccl();
  ncclUniqueId id;
  CHECK(ncclGetUniqueId(&id));
  memcpy(made, &id, sizeof id);
}
C_CCLComm device::transport::Join(const void* given, size_t ranks, size_t rank) {
  PrepareNccl();
  CHECK(cudaSetDevice(kGpu));
  ncclUniqueId id;
  memcpy(&id, given, sizeof id);
  size_t name = std::hash<std::string_view>()(std::string_view(id.internal, sizeof id.internal));
  auto* comm = new Comm(rank, ranks, std::to_string(name));
  CHECK(ncclCommInitRank(&comm->nccl, ranks, id, rank));
  return comm;
}

void device::transport::AllReduce(C_CCLComm comm, char* from, char* to, size_t count, C_DataType type,
                                  C_CCLReduceOp how) {
  CHECK(ncclAllReduce(from, to, count, TypeOf(type), OperatorOf(how), NcclOf(comm), Stream()));
  Finish(comm);
}
void device::transport::ReduceScatter(C_CCLComm comm, char* from, char* to, size_t count, C_DataType type,
                                      C_CCLReduceOp how) {
  CHECK(ncclReduceScatter(from, to, count, TypeOf(type), OperatorOf(how), NcclOf(comm), Stream()));
  Finish(comm);
}
void device::transport::Reduce(C_CCLComm comm, char* from, char* to, size_t count, C_DataType type, C_CCLReduceOp how,
                               size_t root) {
  CHECK(ncclReduce(from, to, count, TypeOf(type), OperatorOf(how), root, NcclOf(comm), Stream()));
  Finish(comm);
}
void device::transport::AllGather(C_CCLComm comm, char* from, char* to, size_t size) {
  CHECK(ncclAllGather(from, to, size, ncclUint8, NcclOf(comm), Stream()));
  Finish(comm);
}
void device::transport::Broadcast(C_CCLComm comm, char* memory, size_t size, size_t root) {
  CHECK(ncclBroadcast(memory, memory, size, ncclUint8, root, NcclOf(comm), Stream()));
  Finish(comm);
}
void device::transport::Exchange(std::vector<Transfer> transfers) {
  CHECK(ncclGroupStart());
  for (const Transfer& transfer : transfers) {
    ncclComm_t comm = NcclOf(transfer.comm);
    if (transfer.is_sent)
      CHECK(ncclSend(transfer.memory, transfer.size, ncclUint8, transfer.peer, comm, Stream()));
    else
      CHECK(ncclRecv(transfer.memory, transfer.size, ncclUint8, transfer.peer, comm, Stream()));
  }
  CHECK(ncclGroupEnd());
  for (const Transfer& transfer : transfers) Finish(transfer.comm);
}

void* device::NewMemory(size_t size) {
  void* memory = nullptr;
  cudaError_t error = cudaHostAlloc(&memory, size, cudaHostAllocPortable | cudaHostAllocMapped);
  if (error == cudaErrorMemoryAllocation) return cudaGetLastError(), nullptr;  // forget it, as NCCL looks for one
  Check(error, "cudaHostAlloc");
  return memory;
}
void device::FreeMemory(void* memory) { CHECK(cudaFreeHost(memory)); }

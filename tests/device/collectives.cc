// The collectives of the table: each runs on its stream, over the transport (tcp.cc, or nccl.cc), with
// the fault that is ordered, before a witness.

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>

#include "collectives.h"

namespace transport = device::transport;

namespace {

using device::Number;
using device::Text;
using device::Transfer;

C_Status IdSize(size_t* size) { return *size = transport::IdSize(), C_SUCCESS; }
C_Status NewId(C_CCLRootId* root) { return transport::NewId(root->data), C_SUCCESS; }
C_Status Join(size_t ranks, C_CCLRootId* root, size_t rank, C_CCLComm* result) {
  return *result = transport::Join(root->data, ranks, rank), C_SUCCESS;
}
C_Status Leave(C_CCLComm comm) { return delete comm, C_SUCCESS; }
C_Status NameOf(C_CCLComm comm, char* name) { return strcpy(name, comm->name.c_str()), C_SUCCESS; }

struct Type {
  const char* name;
  size_t width;
};
const Type& TypeOf(C_DataType type) {
  static const auto& types = *new std::map<C_DataType, Type>{
      {BOOL, {"bool", 1}},         {UINT8, {"uint8", 1}},     {UINT16, {"uint16", 2}},   {INT8, {"int8", 1}},
      {INT16, {"int16", 2}},       {INT32, {"int32", 4}},     {INT64, {"int64", 8}},     {FLOAT16, {"float16", 2}},
      {BFLOAT16, {"bfloat16", 2}}, {FLOAT32, {"float32", 4}}, {FLOAT64, {"float64", 8}},
  };
  auto entry = types.find(type);
  if (entry == types.end()) device::Die("no collective knows type " + std::to_string(type));
  return entry->second;
}

// ---- what a collective has in common with the others --------------------------------------------

struct Call {
  const char* operation;
  size_t bytes;
  C_DataType type;
  C_CCLComm comm;
  C_Stream stream;
  char* result;  // null: none
};

void Testify(const Call& call, int order, double issued, double begin, long kernels_before) {
  long beside = std::max(0L, device::backward_begun - kernels_before);
  static const std::string folder = Text("WITNESS");
  if (folder.empty()) return;
  static auto& mutex = *new std::mutex;
  std::lock_guard<std::mutex> lock(mutex);
  static FILE* file = fopen((folder + "/" + std::to_string(device::Rank()) + ".jsonl").c_str(), "a");
  if (!file) device::Die("no witness in " + folder);
  fprintf(file,
          "{\"rank\": %d, \"group\": \"%s\", \"ranks\": %zu, \"operation\": \"%s\", \"bytes\": %zu, "
          "\"dtype\": \"%s\", \"order\": %d, \"stream\": %d, \"issued\": %.6f, \"begin\": %.6f, \"end\": %.6f, \"beside\": %ld}\n",
          device::Rank(), call.comm->name.c_str(), call.comm->ranks, call.operation, call.bytes, TypeOf(call.type).name, order,
          call.stream->number, issued, begin, device::Now(), beside);
  fflush(file);
}

// Run BODY on the stream, which takes longer by chance, with the fault that is ordered, before a witness.
C_Status Collective(const Call& call, device::Job body) {
  static std::atomic<int> calls{0};
  int order = ++calls;
  char name[16] = "";
  int at = 0, rank = 0;
  sscanf(Text("FAULT").c_str(), "%15[a-z]@%d:%d", name, &at, &rank);
  std::string fault = order == at && rank == device::Rank() ? name : "";
  if (fault == "error") return C_FAILED;
  call.stream->Push([call, body = std::move(body), order, fault, issued = device::Now(),
                     kernels_before = device::backward_issued.load()] {
    if (fault == "die") raise(SIGKILL);
    if (fault == "hang") device::Hang();
    if (fault == "late") sleep(1);
    double begin = device::Now();
    call.stream->Dawdle(Number("DELAY_US"));
    // Until a kernel that was issued after it begins, if one can: what may overlap does so on busy machines, too.
    for (long left_us = Number("LINGER_US"); left_us > 0 && !device::waits && device::backward_begun <= kernels_before; left_us -= 200)
      usleep(200);
    body();
    device::OverwriteReleased();
    if (fault == "wrong" && call.result) call.result[call.bytes - 1] ^= 1;
    Testify(call, order, issued, begin, kernels_before);
  });
  return C_SUCCESS;
}

// ---- collectives --------------------------------------------------------------------------------

char* Start(const void* memory) { return static_cast<char*>(const_cast<void*>(memory)); }

C_Status AllReduce(void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp how, C_CCLComm comm,
                   C_Stream stream) {
  return Collective({"all_reduce", count * TypeOf(type).width, type, comm, stream, Start(to)},
                    [=] { transport::AllReduce(comm, Start(from), Start(to), count, type, how); });
}
C_Status ReduceScatter(void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp how, C_CCLComm comm,
                       C_Stream stream) {
  size_t size = count * TypeOf(type).width;
  return Collective({"reduce_scatter", size * comm->ranks, type, comm, stream, nullptr},
                    [=] { transport::ReduceScatter(comm, Start(from), Start(to), count, type, how); });
}
C_Status ReduceTo(void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp how, size_t root, C_CCLComm comm,
                  C_Stream stream) {
  return Collective({"reduce", count * TypeOf(type).width, type, comm, stream, nullptr},
                    [=] { transport::Reduce(comm, Start(from), Start(to), count, type, how, root); });
}
C_Status AllGather(void* from, void* to, size_t count, C_DataType type, C_CCLComm comm, C_Stream stream) {
  size_t size = count * TypeOf(type).width;
  return Collective({"all_gather", size, type, comm, stream, nullptr},
                    [=] { transport::AllGather(comm, Start(from), Start(to), size); });
}
C_Status Broadcast(void* memory, size_t count, C_DataType type, size_t root, C_CCLComm comm, C_Stream stream) {
  size_t size = count * TypeOf(type).width;
  return Collective({"broadcast", size, type, comm, stream, Start(memory)},
                    [=] { transport::Broadcast(comm, Start(memory), size, root); });
}
C_Status AllToAll(const void** from, const size_t* from_counts, const C_DataType* from_types, void** to,
                  const size_t* to_counts, const C_DataType* to_types, size_t, size_t ranks, C_CCLComm comm,
                  C_Stream stream) {
  std::vector<Transfer> transfers;
  size_t bytes = 0;
  for (size_t peer = 0; peer < ranks; ++peer) {
    transfers.push_back({comm, peer, Start(from[peer]), from_counts[peer] * TypeOf(from_types[peer]).width, true});
    bytes += transfers.back().size;
    transfers.push_back({comm, peer, Start(to[peer]), to_counts[peer] * TypeOf(to_types[peer]).width, false});
  }
  return Collective({"all_to_all", bytes, from_types[0], comm, stream, nullptr},
                    [transfers = std::move(transfers)] { transport::Exchange(transfers); });
}

// What was sent and received since the group has begun goes at the same time, whatever the communicator.
struct Pending {
  C_Stream stream;
  C_DataType type;
  Transfer transfer;
};
thread_local int group_depth = 0;
thread_local std::vector<Pending> pending;

C_Status Flush() {
  std::map<C_Stream, std::vector<Transfer>> all;
  C_DataType type = pending.empty() ? UNDEFINED : pending[0].type;
  for (const Pending& operation : pending) all[operation.stream].push_back(operation.transfer);
  pending.clear();
  for (auto& [stream, transfers] : all) {
    const char* operation = transfers.size() > 1 ? "send_recv" : transfers[0].is_sent ? "send" : "recv";
    size_t bytes = 0;
    for (const Transfer& transfer : transfers) bytes += transfer.size;
    C_Status status = Collective({operation, bytes, type, transfers[0].comm, stream, nullptr},
                                 [transfers = transfers] { transport::Exchange(transfers); });
    if (status != C_SUCCESS) return status;
  }
  return C_SUCCESS;
}
C_Status BeginGroup() { return ++group_depth, C_SUCCESS; }
C_Status EndGroup() { return --group_depth ? C_SUCCESS : Flush(); }
C_Status Add(const Pending& operation) {
  pending.push_back(operation);
  return group_depth ? C_SUCCESS : Flush();
}
C_Status SendTo(void* memory, size_t count, C_DataType type, size_t peer, C_CCLComm comm, C_Stream stream) {
  return Add({stream, type, {comm, peer, Start(memory), count * TypeOf(type).width, true}});
}
C_Status ReceiveFrom(void* memory, size_t count, C_DataType type, size_t peer, C_CCLComm comm, C_Stream stream) {
  return Add({stream, type, {comm, peer, Start(memory), count * TypeOf(type).width, false}});
}

// Paddle 2.6 asks no communicator for its name.
template <typename Table>
auto AddName(Table* table, int) -> decltype(static_cast<void>(table->xccl_get_comm_name)) {
  table->xccl_get_comm_name = NameOf;
}
template <typename Table>
void AddName(Table*, long) {}

}  // namespace

size_t device::WidthOf(C_DataType type) { return TypeOf(type).width; }
void device::Lose(const std::string& what) {
  if (Text("LOSS") == "hang") Hang();
  Die(what + " is lost");
}

void device::AddCollectives(C_DeviceInterface* table) {
  AddName(table, 0);
  table->xccl_get_unique_id_size = IdSize, table->xccl_get_unique_id = NewId;
  table->xccl_comm_init_rank = Join, table->xccl_destroy_comm = Leave;
  table->xccl_all_reduce = AllReduce, table->xccl_reduce_scatter = ReduceScatter;
  table->xccl_all_gather = AllGather, table->xccl_reduce = ReduceTo;
  table->xccl_broadcast = Broadcast, table->xccl_all_to_all = AllToAll;
  table->xccl_send = SendTo, table->xccl_recv = ReceiveFrom;
  table->xccl_group_start = BeginGroup, table->xccl_group_end = EndGroup;
}

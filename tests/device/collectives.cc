// Collectives between processes, over TCP: each rank of a communicator is connected with each other.
//
// As with NCCL nobody compares what the ranks do: if they differ, the sums are wrong or they wait.

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "device.h"
#include "paddle/phi/common/bfloat16.h"
#include "paddle/phi/common/float16.h"

namespace {

using device::Number;
using device::Text;
constexpr long kConnectSeconds = 60;

}  // namespace

struct C_CCLComm_st {
  size_t rank, ranks;
  std::string name;  // the same on all ranks
  std::vector<int> sockets;
};

namespace {

// Bytes that go to a peer, or come from it.
struct Transfer {
  C_CCLComm comm;
  size_t peer;
  char* memory;
  size_t size;
  bool is_sent;
};

[[noreturn]] void Lose(size_t peer) {
  if (Text("LOSS") == "hang") device::Hang();
  device::Die("peer " + std::to_string(peer) + " is lost");
}

// Do all TRANSFERS at the same time, but those of one direction over one socket one after the other.
void Exchange(std::vector<Transfer> transfers) {
  for (;;) {
    std::vector<pollfd> waiting;
    std::vector<Transfer*> first;
    for (Transfer& transfer : transfers) {
      if (!transfer.size) continue;
      int socket = transfer.comm->sockets[transfer.peer];
      short event = transfer.is_sent ? POLLOUT : POLLIN;
      bool has_turn = true;
      for (const pollfd& other : waiting)
        if (other.fd == socket && other.events == event) has_turn = false;
      if (!has_turn) continue;
      first.push_back(&transfer);
      waiting.push_back({socket, event, 0});
    }
    if (first.empty()) return;
    if (poll(waiting.data(), waiting.size(), -1) < 0) continue;
    for (size_t at = 0; at < first.size(); ++at) {
      if (!waiting[at].revents) continue;
      Transfer& transfer = *first[at];
      ssize_t done = transfer.is_sent
                         ? send(waiting[at].fd, transfer.memory, transfer.size, MSG_DONTWAIT | MSG_NOSIGNAL)
                         : recv(waiting[at].fd, transfer.memory, transfer.size, MSG_DONTWAIT);
      if (done < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (done <= 0) Lose(transfer.peer);
      transfer.memory += done, transfer.size -= done;
    }
  }
}

// ---- communicators ------------------------------------------------------------------------------

struct Address {
  char host[64];
  uint16_t port;
};
struct Id {  // what rank 0 gives to the others through Paddle's store
  Address address;
  uint64_t cookie;
};
struct Hello {  // what a rank says when it connects
  uint64_t cookie;
  uint32_t rank;
  uint16_t port;
};

int Listen(uint16_t* port) {
  int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  socklen_t length = sizeof address;
  if (listener < 0 || bind(listener, reinterpret_cast<sockaddr*>(&address), length) ||
      listen(listener, SOMAXCONN) || getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length))
    device::Die("cannot listen");
  *port = ntohs(address.sin_port);
  return listener;
}
int WithoutDelay(int connection) {
  int yes = 1;
  setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  return connection;
}
int Connect(const Address& address) {
  for (double end = device::Now() + kConnectSeconds; device::Now() < end; usleep(20000)) {
    addrinfo hints{}, *resolved = nullptr;
    hints.ai_family = AF_INET, hints.ai_socktype = SOCK_STREAM;
    if (getaddrinfo(address.host, std::to_string(address.port).c_str(), &hints, &resolved)) continue;
    int connection = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int failure = connect(connection, resolved->ai_addr, resolved->ai_addrlen);
    freeaddrinfo(resolved);
    if (!failure) return WithoutDelay(connection);
    close(connection);
  }
  device::Die(std::string("cannot connect to ") + address.host + ":" + std::to_string(address.port));
}
bool Send(int connection, const void* data, size_t size) {
  return send(connection, data, size, MSG_NOSIGNAL) == static_cast<ssize_t>(size);
}
bool Receive(int connection, void* data, size_t size) {
  return recv(connection, data, size, MSG_WAITALL) == static_cast<ssize_t>(size);
}
// Accept the next rank that knows COOKIE.
Hello Accept(int listener, uint64_t cookie, C_CCLComm comm, Address* address) {
  for (;;) {
    sockaddr_in from{};
    socklen_t length = sizeof from;
    int connection = accept4(listener, reinterpret_cast<sockaddr*>(&from), &length, SOCK_CLOEXEC);
    Hello hello;
    if (connection < 0) continue;
    if (Receive(connection, &hello, sizeof hello) && hello.cookie == cookie && hello.rank < comm->ranks) {
      comm->sockets[hello.rank] = WithoutDelay(connection);
      inet_ntop(AF_INET, &from.sin_addr, address->host, sizeof address->host);
      address->port = hello.port;
      return hello;
    }
    close(connection);
  }
}

auto& listeners_mutex = *new std::mutex;
auto& listeners = *new std::map<uint64_t, int>;  // of the ids that were made here, by their cookies

C_Status IdSize(size_t* size) { return *size = sizeof(Id), C_SUCCESS; }
C_Status NewId(C_CCLRootId* root) {
  Id id{};
  int listener = Listen(&id.address.port);
  const char* endpoint = getenv("PADDLE_CURRENT_ENDPOINT");
  std::string host = endpoint && *endpoint ? endpoint : "127.0.0.1";
  snprintf(id.address.host, sizeof id.address.host, "%s", host.substr(0, host.rfind(':')).c_str());
  id.cookie = std::random_device()() * 4294967296 + std::random_device()();
  memcpy(root->data, &id, sizeof id);
  std::lock_guard<std::mutex> lock(listeners_mutex);
  listeners[id.cookie] = listener;
  return C_SUCCESS;
}
C_Status Join(size_t ranks, C_CCLRootId* root, size_t rank, C_CCLComm* result) {
  Id id;
  memcpy(&id, root->data, sizeof id);
  auto* comm = *result = new C_CCLComm_st{rank, ranks, std::to_string(id.cookie), {}};
  comm->sockets.assign(ranks, -1);
  std::vector<Address> table(ranks);
  Hello hello{id.cookie, static_cast<uint32_t>(rank), 0};
  int listener;
  if (rank == 0) {
    std::lock_guard<std::mutex> lock(listeners_mutex);
    listener = listeners.at(id.cookie);
    listeners.erase(id.cookie);
  } else {
    listener = Listen(&hello.port);
  }
  auto greet = [&](size_t peer, const Address& address) {
    comm->sockets[peer] = Connect(address);
    if (!Send(comm->sockets[peer], &hello, sizeof hello)) Lose(peer);
  };
  if (rank == 0) {
    for (size_t met = 1; met < ranks; ++met) {
      Address address;
      table[Accept(listener, id.cookie, comm, &address).rank] = address;
    }
    for (size_t peer = 1; peer < ranks; ++peer)
      if (!Send(comm->sockets[peer], table.data(), sizeof(Address) * ranks)) Lose(peer);
  } else {
    greet(0, id.address);
    if (!Receive(comm->sockets[0], table.data(), sizeof(Address) * ranks)) Lose(0);
    for (size_t peer = 1; peer < rank; ++peer) greet(peer, table[peer]);
    Address address;
    for (size_t met = rank + 1; met < ranks; ++met) Accept(listener, id.cookie, comm, &address);
  }
  close(listener);
  return C_SUCCESS;
}
C_Status Leave(C_CCLComm comm) {
  for (int connection : comm->sockets)
    if (connection >= 0) close(connection);
  return delete comm, C_SUCCESS;
}
C_Status NameOf(C_CCLComm comm, char* name) { return strcpy(name, comm->name.c_str()), C_SUCCESS; }

// ---- numbers ------------------------------------------------------------------------------------

// RESULT is what the PARTS, one of each rank, come to; it may be one of them.
template <typename T, typename Wide = T>
void ReduceAs(const std::vector<const char*>& parts, char* result, size_t count, C_CCLReduceOp how) {
  auto value = [&](size_t rank, size_t at) {
    return static_cast<Wide>(reinterpret_cast<const T*>(parts[rank])[at]);
  };
  for (size_t at = 0; at < count; ++at) {
    Wide all = value(0, at);
    for (size_t rank = 1; rank < parts.size(); ++rank) {
      Wide next = value(rank, at);
      all = how == MAX ? std::max(all, next) : how == MIN ? std::min(all, next) : how == PRODUCT ? all * next : all + next;
    }
    if (how == AVG) all = all / static_cast<Wide>(parts.size());
    reinterpret_cast<T*>(result)[at] = static_cast<T>(all);
  }
}

struct Type {
  const char* name;
  size_t width;
  decltype(&ReduceAs<float>) reduce;
};
const Type& TypeOf(C_DataType type) {
  static const auto& types = *new std::map<C_DataType, Type>{
      {BOOL, {"bool", 1, ReduceAs<uint8_t, int>}},
      {UINT8, {"uint8", 1, ReduceAs<uint8_t, int>}},
      {UINT16, {"uint16", 2, ReduceAs<uint16_t, int>}},
      {INT8, {"int8", 1, ReduceAs<int8_t, int>}},
      {INT16, {"int16", 2, ReduceAs<int16_t, int>}},
      {INT32, {"int32", 4, ReduceAs<int32_t>}},
      {INT64, {"int64", 8, ReduceAs<int64_t>}},
      {FLOAT16, {"float16", 2, ReduceAs<phi::dtype::float16, float>}},
      {BFLOAT16, {"bfloat16", 2, ReduceAs<phi::dtype::bfloat16, float>}},
      {FLOAT32, {"float32", 4, ReduceAs<float>}},
      {FLOAT64, {"float64", 8, ReduceAs<double>}},
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

struct Span {
  char* memory;
  size_t size;
};
const Span kNothing{nullptr, 0};

// Send what SENT says to each peer, and take from each what RECEIVED says: functions of the peer's rank.
template <typename Sent, typename Received>
void Swap(C_CCLComm comm, Sent sent, Received received) {
  std::vector<Transfer> transfers;
  for (size_t peer = 0; peer < comm->ranks; ++peer) {
    Span out = sent(peer), in = received(peer);
    if (peer == comm->rank) {
      if (in.size) memmove(in.memory, out.memory, in.size);
      continue;
    }
    transfers.push_back({comm, peer, out.memory, out.size, true});
    transfers.push_back({comm, peer, in.memory, in.size, false});
  }
  Exchange(transfers);
}

// Set RESULT to what SENT of all ranks to this one comes to; null: this rank gets none.
template <typename Sent>
void Reduce(C_CCLComm comm, size_t count, C_DataType type, C_CCLReduceOp how, Sent sent, char* result) {
  size_t size = count * TypeOf(type).width;
  std::vector<std::string> parts(comm->ranks, std::string(result ? size : 0, 0));
  Swap(comm, sent, [&](size_t peer) { return Span{parts[peer].data(), parts[peer].size()}; });
  if (!result) return;
  std::vector<const char*> views;
  for (const std::string& part : parts) views.push_back(part.data());
  TypeOf(type).reduce(views, result, count, how);
}

C_Status AllReduce(void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp how, C_CCLComm comm,
                   C_Stream stream) {
  Span all{Start(from), count * TypeOf(type).width};
  return Collective({"all_reduce", all.size, type, comm, stream, Start(to)}, [=] {
    Reduce(comm, count, type, how, [&](size_t) { return all; }, Start(to));
  });
}
C_Status ReduceScatter(void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp how, C_CCLComm comm,
                       C_Stream stream) {
  size_t size = count * TypeOf(type).width;
  return Collective({"reduce_scatter", size * comm->ranks, type, comm, stream, nullptr}, [=] {
    Reduce(comm, count, type, how, [&](size_t peer) { return Span{Start(from) + peer * size, size}; }, Start(to));
  });
}
C_Status ReduceTo(void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp how, size_t root, C_CCLComm comm,
                  C_Stream stream) {
  Span all{Start(from), count * TypeOf(type).width};
  return Collective({"reduce", all.size, type, comm, stream, nullptr}, [=] {
    auto sent = [&](size_t peer) { return peer == root ? all : kNothing; };
    Reduce(comm, count, type, how, sent, comm->rank == root ? Start(to) : nullptr);
  });
}
C_Status AllGather(void* from, void* to, size_t count, C_DataType type, C_CCLComm comm, C_Stream stream) {
  Span own{Start(from), count * TypeOf(type).width};
  return Collective({"all_gather", own.size, type, comm, stream, nullptr}, [=] {
    Swap(comm, [&](size_t) { return own; }, [&](size_t peer) { return Span{Start(to) + peer * own.size, own.size}; });
  });
}
C_Status Broadcast(void* memory, size_t count, C_DataType type, size_t root, C_CCLComm comm, C_Stream stream) {
  Span all{Start(memory), count * TypeOf(type).width};
  return Collective({"broadcast", all.size, type, comm, stream, all.memory}, [=] {
    bool is_root = comm->rank == root;
    Swap(comm, [&](size_t) { return is_root ? all : kNothing; },
         [&](size_t peer) { return peer == root && !is_root ? all : kNothing; });
  });
}
C_Status AllToAll(const void** from, const size_t* from_counts, const C_DataType* from_types, void** to,
                  const size_t* to_counts, const C_DataType* to_types, size_t, size_t ranks, C_CCLComm comm,
                  C_Stream stream) {
  std::vector<Span> sent, received;
  size_t bytes = 0;
  for (size_t peer = 0; peer < ranks; ++peer) {
    sent.push_back({Start(from[peer]), from_counts[peer] * TypeOf(from_types[peer]).width});
    received.push_back({Start(to[peer]), to_counts[peer] * TypeOf(to_types[peer]).width});
    bytes += sent.back().size;
  }
  return Collective({"all_to_all", bytes, from_types[0], comm, stream, nullptr}, [=] {
    Swap(comm, [&](size_t peer) { return sent[peer]; }, [&](size_t peer) { return received[peer]; });
  });
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
                                 [transfers = transfers] { Exchange(transfers); });
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

// Collectives between processes, over TCP: each rank of a communicator is connected with each other.
//
// As with NCCL nobody compares what the ranks do: if they differ, the sums are wrong or they wait.

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "collectives.h"
#include "paddle/phi/common/bfloat16.h"
#include "paddle/phi/common/float16.h"

namespace {

using device::Transfer;
constexpr long kConnectSeconds = 60;

struct Comm : C_CCLComm_st {
  Comm(size_t rank, size_t ranks, std::string name) : C_CCLComm_st(rank, ranks, std::move(name)), sockets(ranks, -1) {}
  ~Comm() override {
    for (int connection : sockets)
      if (connection >= 0) close(connection);
  }
  std::vector<int> sockets;
};
int SocketTo(C_CCLComm comm, size_t peer) { return static_cast<Comm*>(comm)->sockets[peer]; }

[[noreturn]] void LosePeer(size_t peer) { device::Lose("peer " + std::to_string(peer)); }

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
Hello Accept(int listener, uint64_t cookie, Comm* comm, Address* address) {
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

}  // namespace

size_t device::transport::IdSize() { return sizeof(Id); }
void device::transport::NewId(void* made) {
  Id id{};
  int listener = Listen(&id.address.port);
  const char* endpoint = getenv("PADDLE_CURRENT_ENDPOINT");
  std::string host = endpoint && *endpoint ? endpoint : "127.0.0.1";
  snprintf(id.address.host, sizeof id.address.host, "%s", host.substr(0, host.rfind(':')).c_str());
  id.cookie = std::random_device()() * 4294967296 + std::random_device()();
  memcpy(made, &id, sizeof id);
  std::lock_guard<std::mutex> lock(listeners_mutex);
  listeners[id.cookie] = listener;
}
C_CCLComm device::transport::Join(const void* given, size_t ranks, size_t rank) {
  Id id;
  memcpy(&id, given, sizeof id);
  auto* comm = new Comm(rank, ranks, std::to_string(id.cookie));
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
    if (!Send(comm->sockets[peer], &hello, sizeof hello)) LosePeer(peer);
  };
  if (rank == 0) {
    for (size_t met = 1; met < ranks; ++met) {
      Address address;
      table[Accept(listener, id.cookie, comm, &address).rank] = address;
    }
    for (size_t peer = 1; peer < ranks; ++peer)
      if (!Send(comm->sockets[peer], table.data(), sizeof(Address) * ranks)) LosePeer(peer);
  } else {
    greet(0, id.address);
    if (!Receive(comm->sockets[0], table.data(), sizeof(Address) * ranks)) LosePeer(0);
    for (size_t peer = 1; peer < rank; ++peer) greet(peer, table[peer]);
    Address address;
    for (size_t met = rank + 1; met < ranks; ++met) Accept(listener, id.cookie, comm, &address);
  }
  close(listener);
  return comm;
}

namespace {

// Do those TRANSFERS that this rank sends to itself.
void CopyOwn(std::vector<Transfer>* transfers) {
  auto received = transfers->begin();
  for (Transfer& sent : *transfers) {
    if (sent.peer != sent.comm->rank || !sent.is_sent) continue;
    while (received->is_sent || received->comm != sent.comm || received->peer != sent.peer) ++received;
    memmove(received->memory, sent.memory, sent.size);
    sent.size = received->size = 0;
    ++received;
  }
}

}  // namespace

void device::transport::Exchange(std::vector<Transfer> transfers) {
  CopyOwn(&transfers);
  for (;;) {
    std::vector<pollfd> waiting;
    std::vector<Transfer*> first;
    for (Transfer& transfer : transfers) {
      if (!transfer.size) continue;
      int socket = SocketTo(transfer.comm, transfer.peer);
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
      if (done <= 0) LosePeer(transfer.peer);
      transfer.memory += done, transfer.size -= done;
    }
  }
}

// ---- numbers ------------------------------------------------------------------------------------

namespace {

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

decltype(&ReduceAs<float>) ReducerOf(C_DataType type) {
  static const auto& reducers = *new std::map<C_DataType, decltype(&ReduceAs<float>)>{
      {BOOL, ReduceAs<uint8_t, int>},
      {UINT8, ReduceAs<uint8_t, int>},
      {UINT16, ReduceAs<uint16_t, int>},
      {INT8, ReduceAs<int8_t, int>},
      {INT16, ReduceAs<int16_t, int>},
      {INT32, ReduceAs<int32_t>},
      {INT64, ReduceAs<int64_t>},
      {FLOAT16, ReduceAs<phi::dtype::float16, float>},
      {BFLOAT16, ReduceAs<phi::dtype::bfloat16, float>},
      {FLOAT32, ReduceAs<float>},
      {FLOAT64, ReduceAs<double>},
  };
  return reducers.at(type);
}

// ---- collectives --------------------------------------------------------------------------------

struct Span {
  char* memory;
  size_t size;
};
const Span kNothing{nullptr, 0};

// Send what SENT says to each peer, and take from each what RECEIVED says: functions of the peer's rank.
template <typename Sent, typename Received>
void Swap(C_CCLComm comm, Sent sent, Received received) {
  std::vector<device::Transfer> transfers;
  for (size_t peer = 0; peer < comm->ranks; ++peer) {
    Span out = sent(peer), in = received(peer);
    if (peer == comm->rank) {
      if (in.size) memmove(in.memory, out.memory, in.size);
      continue;
    }
    transfers.push_back({comm, peer, out.memory, out.size, true});
    transfers.push_back({comm, peer, in.memory, in.size, false});
  }
  device::transport::Exchange(transfers);
}

// Set RESULT to what SENT of all ranks to this one comes to; null: this rank gets none.
template <typename Sent>
void ReduceParts(C_CCLComm comm, size_t count, C_DataType type, C_CCLReduceOp how, Sent sent, char* result) {
  size_t size = count * device::WidthOf(type);
  std::vector<std::string> parts(comm->ranks, std::string(result ? size : 0, 0));
  Swap(comm, sent, [&](size_t peer) { return Span{parts[peer].data(), parts[peer].size()}; });
  if (!result) return;
  std::vector<const char*> views;
  for (const std::string& part : parts) views.push_back(part.data());
  ReducerOf(type)(views, result, count, how);
}

}  // namespace

void device::transport::AllReduce(C_CCLComm comm, char* from, char* to, size_t count, C_DataType type,
                                  C_CCLReduceOp how) {
  ReduceParts(comm, count, type, how, [&](size_t) { return Span{from, count * WidthOf(type)}; }, to);
}
void device::transport::ReduceScatter(C_CCLComm comm, char* from, char* to, size_t count, C_DataType type,
                                      C_CCLReduceOp how) {
  size_t size = count * WidthOf(type);
  ReduceParts(comm, count, type, how, [&](size_t peer) { return Span{from + peer * size, size}; }, to);
}
void device::transport::Reduce(C_CCLComm comm, char* from, char* to, size_t count, C_DataType type, C_CCLReduceOp how,
                               size_t root) {
  auto sent = [&](size_t peer) { return peer == root ? Span{from, count * WidthOf(type)} : kNothing; };
  ReduceParts(comm, count, type, how, sent, comm->rank == root ? to : nullptr);
}
void device::transport::AllGather(C_CCLComm comm, char* from, char* to, size_t size) {
  Swap(comm, [&](size_t) { return Span{from, size}; }, [&](size_t peer) { return Span{to + peer * size, size}; });
}
void device::transport::Broadcast(C_CCLComm comm, char* memory, size_t size, size_t root) {
  Span all{memory, size};
  bool is_root = comm->rank == root;
  Swap(comm, [&](size_t) { return is_root ? all : kNothing; },
       [&](size_t peer) { return peer == root && !is_root ? all : kNothing; });
}

// ---- memory -------------------------------------------------------------------------------------

void* device::NewMemory(size_t size) {
  void* memory = nullptr;
  return posix_memalign(&memory, 256, size) ? nullptr : memory;
}
void device::FreeMemory(void* memory) { free(memory); }

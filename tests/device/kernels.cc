// Paddle's own CPU kernels as those of the device, on its memory and behind the host's back (x86-64).
//
// Paddle calls a kernel as a C++ function of its own signature. In place of it stands a stub, from
// which the arguments are read again as the table of the kernel's arguments tells. A kernel that only
// fills its outputs then runs on the stream of its context; the first run of each tells whether it
// does. Others run at once when the stream has come to its end, and views touch no memory.
//
// Inputs on a stream do not hold their memory: as on a GPU, the order of the stream protects them.

#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <vector>

#include "device.h"
#include "paddle/phi/backends/cpu/cpu_context.h"
#include "paddle/phi/backends/custom/custom_context.h"
#include "paddle/phi/core/dense_tensor.h"
#include "paddle/phi/core/kernel_context.h"
#include "paddle/phi/core/kernel_factory.h"
#include "paddle/phi/core/selected_rows.h"

#if !defined(__x86_64__)
#error "stubs are for x86-64"
#endif

namespace {

using phi::CPUContext;
using phi::DenseTensor;
using phi::DeviceContext;

bool IsOnDevice(const phi::Place& place) { return place.GetType() == phi::AllocationType::CUSTOM; }
C_Stream StreamOf(const DeviceContext& context) {
  return static_cast<C_Stream>(static_cast<const phi::CustomContext&>(context).stream());
}

// ---- the contexts in which CPU kernels work on the device ---------------------------------------

// Memory for what a kernel needs while it runs on a stream: only the host uses the device's allocator.
class Heap : public phi::Allocator {
 public:
  explicit Heap(const phi::Place& place) : place_(place) {}
  bool IsAllocThreadSafe() const override { return true; }
  AllocationPtr Allocate(size_t size) override {
    void* memory = nullptr;
    if (posix_memalign(&memory, 256, size + 1)) device::Die("no memory for a kernel");
    auto release = [](phi::Allocation* allocation) { free(allocation->ptr()); };
    return AllocationPtr(new phi::Allocation(memory, size, release, place_),
                         [](phi::Allocation* allocation) { delete allocation; });
  }

 private:
  phi::Place place_;
};

struct Contexts {
  explicit Contexts(const DeviceContext& given)
      : heap(phi::CPUPlace()), at_once(given.GetPlace()), on_stream(phi::CPUPlace()) {
    at_once.SetAllocator(&given.GetAllocator());
    on_stream.SetAllocator(&heap);
    for (CPUContext* context : {&at_once, &on_stream}) {
      context->SetHostAllocator(&given.GetHostAllocator());
      context->SetZeroAllocator(&given.GetZeroAllocator());
      context->SetHostZeroAllocator(&given.GetHostZeroAllocator());
      try {
        context->SetGenerator(given.GetGenerator());
        context->SetHostGenerator(given.GetHostGenerator());
      } catch (const std::exception&) {  // the context of a communicator has none
      }
    }
  }
  Heap heap;
  CPUContext at_once, on_stream;
};
Contexts& ContextsFor(const DeviceContext& given) {
  static auto& mutex = *new std::mutex;
  static auto& known = *new std::map<const DeviceContext*, std::unique_ptr<Contexts>>;
  std::lock_guard<std::mutex> lock(mutex);
  auto& contexts = known[&given];
  if (!contexts) contexts = std::make_unique<Contexts>(given);
  return *contexts;
}

// ---- kernels ------------------------------------------------------------------------------------

enum class Manner { kUnknown, kOnStream, kAtOnce, kView };
struct Kernel {
  std::string name;
  phi::Kernel original;
  std::atomic<Manner> manner;
};

// These draw from a generator, whose state the host may ask for.
bool Draws(const std::string& name) {
  for (const char* part : {"random", "rand", "uniform", "gaussian", "normal", "dropout", "bernoulli", "multinomial",
                           "poisson", "exponential", "gumbel", "rrelu", "binomial", "dirichlet", "gamma", "shuffle"})
    if (name.find(part) != std::string::npos) return true;
  return false;
}

struct Arguments {
  const DeviceContext* context;
  std::vector<std::vector<const phi::TensorBase*>> inputs;  // of each parameter; one that may be missing is null
  std::vector<phi::Attribute> attributes;
  std::vector<std::vector<phi::TensorBase*>> outputs;

  bool IsDense() const {
    auto are_dense = [](auto& parameters) {
      for (auto& parameter : parameters)
        for (auto* tensor : parameter)
          if (tensor && !DenseTensor::classof(tensor)) return false;
      return true;
    };
    return are_dense(inputs) && are_dense(outputs);
  }
  std::vector<DenseTensor*> DenseOutputs() const {
    std::vector<DenseTensor*> tensors;
    for (auto& parameter : outputs)
      for (auto* tensor : parameter)
        if (tensor) tensors.push_back(static_cast<DenseTensor*>(tensor));
    return tensors;
  }
};

void Count(const Kernel& kernel, std::atomic<long>& kernels) {
  static const std::string backward = "_grad";
  if (kernel.name.size() > backward.size() && !kernel.name.compare(kernel.name.size() - backward.size(), std::string::npos, backward))
    ++kernels;
}
void Run(const Kernel& kernel, phi::KernelContext* call) {
  device::AtOnce within;
  Count(kernel, device::backward_begun);
  kernel.original(call);
}
void Run(const Kernel& kernel, const Arguments& arguments, CPUContext* context) {
  phi::KernelContext call(context);
  std::deque<DenseTensor> garbage;
  for (auto parameter : arguments.inputs) {
    for (auto*& tensor : parameter) {
      // On devices Paddle keeps no input that a gradient does not need, and the CPU's kernel looks at it.
      if (!tensor || tensor->initialized() || tensor->numel() <= 0 || !DenseTensor::classof(tensor)) continue;
      if (tensor->dtype() == phi::DataType::UNDEFINED) continue;
      size_t size = tensor->numel() * phi::SizeOf(tensor->dtype());
      auto memory = std::shared_ptr<phi::Allocation>(Heap(context->GetPlace()).Allocate(size));
      memset(memory->ptr(), 0xff, size);
      tensor = &garbage.emplace_back(memory, static_cast<const DenseTensor*>(tensor)->meta());
    }
    call.EmplaceBackInputs({parameter.begin(), parameter.end()});
  }
  for (auto& attribute : arguments.attributes) call.EmplaceBackAttr(attribute);
  for (auto& parameter : arguments.outputs)
    call.EmplaceBackOutputs({parameter.begin(), parameter.end()});
  Run(kernel, &call);
}

// Run KERNEL, and find out whether it does nothing but fill its outputs.
Manner RunFirst(const Kernel& kernel, const Arguments& arguments, CPUContext* context) {
  bool is_dense = arguments.IsDense();
  std::vector<std::pair<DenseTensor*, DenseTensor>> before;
  if (is_dense)
    for (DenseTensor* output : arguments.DenseOutputs()) before.emplace_back(output, *output);
  Run(kernel, arguments, context);
  if (!is_dense || Draws(kernel.name)) return Manner::kAtOnce;
  for (auto& [output, old] : before) {
    if (!output->initialized() || !(output->meta() == old.meta())) return Manner::kAtOnce;
    bool is_in_place = old.initialized() && old.place() == output->place();
    if (is_in_place ? output->Holder() != old.Holder() : output->Holder().use_count() > 1) return Manner::kAtOnce;
  }
  return Manner::kOnStream;
}

// What a kernel needs that runs when its caller has gone on.
struct Task {
  const Kernel& kernel;
  Arguments arguments;
  Contexts& contexts;
  std::deque<DenseTensor> tensors;  // its own, for the caller's may be gone
  std::map<const phi::TensorBase*, DenseTensor*> owned;
  std::map<const phi::Allocation*, std::shared_ptr<phi::Allocation>> borrowed;
  std::vector<std::pair<DenseTensor*, DenseTensor>> outputs;

  Task(const Kernel& kernel, const Arguments& given, Contexts& contexts)
      : kernel(kernel), arguments(given), contexts(contexts) {
    for (auto& parameter : arguments.outputs)
      for (auto*& tensor : parameter) {
        if (!tensor) continue;
        auto* output = static_cast<DenseTensor*>(tensor);
        given.context->Alloc(output, output->dtype());
        outputs.emplace_back(Own(*output), DenseTensor());
        outputs.back().second = *outputs.back().first;
        tensor = outputs.back().first;
      }
    for (auto& parameter : arguments.inputs)
      for (auto*& tensor : parameter)
        if (tensor) tensor = Own(static_cast<const DenseTensor&>(*tensor));
  }
  // What a kernel works on in place is one tensor, as some of them check.
  DenseTensor* Own(const DenseTensor& given) {
    auto& own = owned[&given];
    return own ? own : own = Copied(given);
  }
  DenseTensor* Copied(const DenseTensor& given) {
    if (!given.initialized() || !IsOnDevice(given.place())) return &tensors.emplace_back(given);
    const phi::Allocation& holder = *given.Holder();
    auto& same = borrowed[&holder];
    // As the host's: Paddle orders copies on a device by streams of its own, under a lock that it holds
    // at its end while it waits for ours.
    if (!same) same = std::make_shared<phi::Allocation>(holder.ptr(), holder.size(), phi::CPUPlace());
    return &tensors.emplace_back(same, given.meta());
  }
  void Perform() {
    try {
      Run(kernel, arguments, &contexts.on_stream);
    } catch (const std::exception& error) {
      device::Die(kernel.name + ": " + error.what());
    }
    for (auto& [output, expected] : outputs) {
      if (output->dtype() != expected.dtype() || output->numel() != expected.numel())
        device::Die(kernel.name + " does not only fill its outputs");
      // Some take other memory now and then, or an input's.
      size_t size = expected.numel() * phi::SizeOf(expected.dtype());
      if (output->data() != expected.data()) memcpy(expected.data(), output->data(), size);
    }
  }
};

bool CanWait(const Kernel& kernel, const Arguments& arguments) {
  static const bool is_at_once = device::Number("AT_ONCE");
  if (kernel.manner != Manner::kOnStream || is_at_once || !arguments.IsDense()) return false;
  // In place it finds the old type there, and sets the new one itself.
  if (kernel.name == "cast" && paddle::get<phi::DataType>(arguments.attributes[0]) != arguments.outputs[0][0]->dtype())
    return false;
  for (DenseTensor* output : arguments.DenseOutputs()) {
    if (output->dtype() == phi::DataType::UNDEFINED || output->numel() <= 0) return false;
    // What is updated in place, as an optimizer's powers, comes to the device with the first update.
    if (output->initialized() && !IsOnDevice(output->place())) return false;
  }
  return true;
}

void Launch(Kernel& kernel, const Arguments& arguments) {
  Count(kernel, device::backward_issued);
  Contexts& contexts = ContextsFor(*arguments.context);
  C_Stream stream = StreamOf(*arguments.context);
  if (CanWait(kernel, arguments)) {
    auto task = std::make_shared<Task>(kernel, arguments, contexts);
    stream->Push([task, stream] {
      static const long late_us = device::Number("KERNEL_US");
      stream->Dawdle(late_us);
      task->Perform();
    });
    return;
  }
  if (kernel.manner == Manner::kView) return Run(kernel, arguments, &contexts.at_once);
  stream->Drain();
  if (kernel.manner == Manner::kUnknown)
    kernel.manner = RunFirst(kernel, arguments, &contexts.at_once);
  else
    Run(kernel, arguments, &contexts.at_once);
}

// ---- stubs --------------------------------------------------------------------------------------

struct Registers {  // as testdevice_entry writes them down
  uint64_t integers[6];
  uint64_t floats[8];
};

// The arguments of a call, one after the other, as the System V ABI of x86-64 passes them.
struct Reader {
  const Registers& registers;
  const uint64_t* stack;
  int integers = 0, floats = 0;

  uint64_t Integer() { return integers < 6 ? registers.integers[integers++] : *stack++; }
  template <typename T>
  T Float() {
    T value;
    memcpy(&value, floats < 8 ? &registers.floats[floats++] : stack++, sizeof value);
    return value;
  }
  template <typename T>
  const T& Reference() {
    return *reinterpret_cast<const T*>(Integer());
  }
  // Two words: both in registers, or both on the stack.
  phi::Place Place() {
    static_assert(sizeof(phi::Place) == 16);
    bool is_in_registers = integers <= 4;
    uint64_t words[2];
    for (uint64_t& word : words) word = is_in_registers ? Integer() : *stack++;
    phi::Place place;
    memcpy(static_cast<void*>(&place), words, sizeof place);
    return place;
  }
};

using Inputs = std::vector<const phi::TensorBase*>;
using Outputs = std::vector<phi::TensorBase*>;
template <typename T>
using Pointers = std::vector<const T*>;

template <typename T>
Inputs Single(Reader& reader) {
  return {&reader.Reference<T>()};
}
template <typename T>
Inputs Optional(Reader& reader) {
  return {reader.Reference<paddle::optional<T>>().get_ptr()};
}
Inputs Several(const Pointers<DenseTensor>* given) {
  return given ? Inputs(given->begin(), given->end()) : Inputs{nullptr};
}
// How each type of parameter is read.
const std::map<std::type_index, Inputs (*)(Reader&)>& InputTypes() {
  static const auto& types = *new std::map<std::type_index, Inputs (*)(Reader&)>{
      {typeid(DenseTensor), Single<DenseTensor>},
      {typeid(phi::SelectedRows), Single<phi::SelectedRows>},
      {typeid(paddle::optional<DenseTensor>), Optional<DenseTensor>},
      {typeid(paddle::optional<phi::SelectedRows>), Optional<phi::SelectedRows>},
      {typeid(Pointers<DenseTensor>), [](Reader& reader) { return Several(&reader.Reference<Pointers<DenseTensor>>()); }},
      {typeid(paddle::optional<Pointers<DenseTensor>>),
       [](Reader& reader) { return Several(reader.Reference<paddle::optional<Pointers<DenseTensor>>>().get_ptr()); }},
  };
  return types;
}
const std::map<std::type_index, Outputs (*)(Reader&)>& OutputTypes() {
  static const auto& types = *new std::map<std::type_index, Outputs (*)(Reader&)>{
      {typeid(DenseTensor*), [](Reader& reader) { return Outputs{reinterpret_cast<DenseTensor*>(reader.Integer())}; }},
      {typeid(phi::SelectedRows*),
       [](Reader& reader) { return Outputs{reinterpret_cast<phi::SelectedRows*>(reader.Integer())}; }},
      {typeid(std::vector<DenseTensor*>),
       [](Reader& reader) {
         auto& several = reader.Reference<std::vector<DenseTensor*>>();
         return Outputs(several.begin(), several.end());
       }},
  };
  return types;
}
phi::Attribute Attribute(phi::AttributeType type, Reader& reader) {
  using phi::AttributeType;
  switch (type) {
    case AttributeType::BOOL: return (reader.Integer() & 0xff) != 0;
    case AttributeType::INT32: return static_cast<int>(reader.Integer());
    case AttributeType::INT64: return static_cast<int64_t>(reader.Integer());
    case AttributeType::FLOAT32: return reader.Float<float>();
    case AttributeType::FLOAT64: return reader.Float<double>();
    case AttributeType::STRING: return reader.Reference<std::string>();
    case AttributeType::BOOLS: return reader.Reference<std::vector<bool>>();
    case AttributeType::INT32S: return reader.Reference<std::vector<int>>();
    case AttributeType::INT64S: return reader.Reference<std::vector<int64_t>>();
    case AttributeType::FLOAT32S: return reader.Reference<std::vector<float>>();
    case AttributeType::FLOAT64S: return reader.Reference<std::vector<double>>();
    case AttributeType::STRINGS: return reader.Reference<std::vector<std::string>>();
    case AttributeType::SCALAR: return reader.Reference<phi::Scalar>();
    case AttributeType::SCALARS: return reader.Reference<std::vector<phi::Scalar>>();
    case AttributeType::INT_ARRAY: return reader.Reference<phi::IntArray>();
    case AttributeType::DATA_TYPE: return static_cast<phi::DataType>(reader.Integer());
    case AttributeType::DATA_LAYOUT: return static_cast<phi::DataLayout>(reader.Integer());
    case AttributeType::PLACE: return reader.Place();
    default: device::Die("a kernel has an attribute of an unknown type");
  }
}
// Whether all of its parameters can be read.
bool IsReadable(const phi::KernelArgsDef& parameters) {
  for (auto& parameter : parameters.input_defs())
    if (!InputTypes().count(parameter.type_index)) return false;
  for (auto& parameter : parameters.output_defs())
    if (!OutputTypes().count(parameter.type_index)) return false;
  for (auto& parameter : parameters.attribute_defs())
    if (parameter.type_index == phi::AttributeType::UNDEFINED) return false;
  return true;
}

}  // namespace

extern "C" __attribute__((visibility("hidden"), used)) void testdevice_call(
    Kernel* kernel, const Registers* registers, const uint64_t* stack) {
  Reader reader{*registers, stack};
  Arguments arguments;
  arguments.context = &reader.Reference<DeviceContext>();
  auto& parameters = kernel->original.args_def();
  for (auto& parameter : parameters.input_defs()) arguments.inputs.push_back(InputTypes().at(parameter.type_index)(reader));
  for (auto& parameter : parameters.attribute_defs())
    arguments.attributes.push_back(Attribute(parameter.type_index, reader));
  for (auto& parameter : parameters.output_defs()) arguments.outputs.push_back(OutputTypes().at(parameter.type_index)(reader));
  Launch(*kernel, arguments);
}

// A stub comes here with its kernel in r11. Exceptions pass.
asm(R"(
.text
.hidden testdevice_entry
.globl testdevice_entry
.type testdevice_entry, @function
testdevice_entry:
  .cfi_startproc
  push %rbp
  .cfi_def_cfa_offset 16
  .cfi_offset %rbp, -16
  mov %rsp, %rbp
  .cfi_def_cfa_register %rbp
  sub $112, %rsp
  mov %rdi, (%rsp)
  mov %rsi, 8(%rsp)
  mov %rdx, 16(%rsp)
  mov %rcx, 24(%rsp)
  mov %r8, 32(%rsp)
  mov %r9, 40(%rsp)
  movsd %xmm0, 48(%rsp)
  movsd %xmm1, 56(%rsp)
  movsd %xmm2, 64(%rsp)
  movsd %xmm3, 72(%rsp)
  movsd %xmm4, 80(%rsp)
  movsd %xmm5, 88(%rsp)
  movsd %xmm6, 96(%rsp)
  movsd %xmm7, 104(%rsp)
  mov %r11, %rdi
  mov %rsp, %rsi
  lea 16(%rbp), %rdx
  call testdevice_call
  leave
  .cfi_def_cfa %rsp, 8
  ret
  .cfi_endproc
.size testdevice_entry, .-testdevice_entry
)");
extern "C" void testdevice_entry();

namespace {

constexpr size_t kStubBytes = 24;
// At AT: go to where TARGET is.
void WriteJump(unsigned char* at, const void* target) {
  memcpy(at, "\xff\x25\0\0\0\0", 6);  // jmp *0(%rip)
  memcpy(at + 6, &target, 8);
}
void WriteStub(unsigned char* at, const Kernel* kernel) {
  memcpy(at, "\x49\xbb", 2);  // mov $KERNEL, %r11
  memcpy(at + 2, &kernel, 8);
  WriteJump(at + 10, reinterpret_cast<const void*>(testdevice_entry));
}

// Kernels take their context, on the device, for one of the device, and ask it for its stream.
void* StreamForAny(const phi::CustomContext* context) {
  if (!phi::CustomContext::classof(context)) return device::ComputeStream(context->GetPlace().GetDeviceId());
  return context->GetStream()->raw_stream();
}
void ReplaceStream() {
  void* (phi::CustomContext::*method)() const = &phi::CustomContext::stream;
  void* function;  // the first word of a pointer to a method that is not virtual
  memcpy(&function, &method, sizeof function);
  auto page = reinterpret_cast<uintptr_t>(function) & ~4095UL;
  auto protect = [page](int how) {
    if (mprotect(reinterpret_cast<void*>(page), 8192, how)) device::Die("cannot replace a method of Paddle");
  };
  protect(PROT_READ | PROT_WRITE | PROT_EXEC);
  WriteJump(static_cast<unsigned char*>(function), reinterpret_cast<const void*>(StreamForAny));
  protect(PROT_READ | PROT_EXEC);
}

bool IsOffered(const std::string& name) {
  for (const char* begin : {"memcpy", "c_", "p_"})  // for other devices, or over gloo
    if (!name.rfind(begin, 0)) return false;
  return ("," + device::Text("WITHOUT") + ",").find("," + name + ",") == std::string::npos;
}

}  // namespace

void device::AddKernels(const std::string& kind) {
  const phi::Backend backend = paddle::experimental::StringToBackend(kind.c_str());
  auto& kernels = *new std::deque<Kernel>;
  auto& factory = phi::KernelFactory::Instance().kernels();
  std::vector<std::pair<phi::KernelKeyMap*, phi::KernelKey>> places;
  for (auto& [name, variants] : factory)
    for (auto& [key, original] : variants) {
      if (key.backend() != phi::Backend::CPU || !IsOffered(name) || !IsReadable(original.args_def())) continue;
      // Paddle has kernels of its own for any plug-in: collectives, for example.
      if (variants.count({phi::Backend::CUSTOM, key.layout(), key.dtype()})) continue;
      bool is_view = key.layout() == phi::DataLayout::STRIDED;
      kernels.emplace_back();
      kernels.back().name = name, kernels.back().original = original;
      kernels.back().manner = is_view ? Manner::kView : Manner::kUnknown;
      places.emplace_back(&variants, phi::KernelKey(backend, key.layout(), key.dtype()));
    }
  size_t size = kernels.size() * kStubBytes;
  void* stubs = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (stubs == MAP_FAILED) device::Die("no memory for stubs");
  auto* stub = static_cast<unsigned char*>(stubs);
  for (size_t at = 0; at < kernels.size(); ++at) {
    Kernel& kernel = kernels[at];
    // Eager mode calls the stub. Static graphs, and kernels of other forms, make a context themselves.
    auto run = [&kernel](phi::KernelContext* call) {
      auto& given = const_cast<DeviceContext&>(call->GetDeviceContext<DeviceContext>());
      Count(kernel, device::backward_issued);
      StreamOf(given)->Drain();
      call->SetDeviceContext(&ContextsFor(given).at_once);
      Run(kernel, call);
      call->SetDeviceContext(&given);
    };
    bool is_function = kernel.original.GetVariadicKernelFn<void*>() != nullptr;
    phi::Kernel ours(run, is_function ? stub : nullptr);
    WriteStub(stub, &kernel);
    stub += kStubBytes;
    *ours.mutable_args_def() = kernel.original.args_def();
    ours.get_kerneltype_forvar_fn_ = kernel.original.get_kerneltype_forvar_fn_;
    for (auto& input : ours.mutable_args_def()->input_defs())
      if (input.backend == phi::Backend::CPU) input.SetBackend(backend);
    for (auto& output : ours.mutable_args_def()->output_defs())
      if (output.backend == phi::Backend::CPU) output.SetBackend(backend);
    (*places[at].first)[places[at].second] = ours;
  }
  mprotect(stubs, size, PROT_READ | PROT_EXEC);
  ReplaceStream();
}

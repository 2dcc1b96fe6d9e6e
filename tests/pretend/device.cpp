// A device without hardware: memory of the host, real values, two device numbers. Work is queued on streams and done as
// late as the order that was asked for allows: a wait that is missing gives wrong numbers. It takes the place of "hpu",
// the one device of others whose tensors torch puts into parameters of the host (`parameter.data = tensor`).
//
// - Every operator without a kernel here comes to `fallback`: a kernel of the CPU runs on views of the same memory when
//   the queue comes to it. What its results look like it has said before, of zeros.
// - Memory that is freed goes back to the stream it was allocated on, as in CUDA's caching allocator. What is handed out
//   is filled with not-a-number, in the order of that stream.
// - The current device and the current streams are those of a thread.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <sstream>

extern "C" {  // of Python, which has them where this is loaded
int PyGILState_Check(void);
void* PyEval_SaveThread(void);
void PyEval_RestoreThread(void*);
}

namespace {
constexpr int kDevices = 2;
constexpr int64_t kMemory = int64_t(8) << 30;
constexpr auto kType = c10::DeviceType::HPU;
enum Order { kNow, kLate, kSides, kRandom };

struct WithoutGil {
  void* state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~WithoutGil() { if (state) PyEval_RestoreThread(state); }
};

// --- streams ---

struct Stream;
struct Task {
  std::function<void()> run;
  Stream* other = nullptr;  // waits until `other` has done so many
  uint64_t number = 0;
};
struct Stream {
  int64_t id;
  int device;
  std::deque<Task> queue;
  uint64_t issued = 0, done = 0;
  bool running = false;
};
struct Mark {
  Stream* stream = nullptr;
  uint64_t number = 0;
  int asked = 0;
  std::shared_ptr<double> time = std::make_shared<double>(-1.0);
};

// Nothing of these ends before the process: tensors end as late.
auto& mutex = *new std::mutex;
auto& moved = *new std::condition_variable;
auto& streams = *new std::deque<Stream>{{0, 0}, {0, 1}};  // those of number 0, then all others; a deque moves none
std::atomic<int> order{kNow}, home{0};
auto& dice = *new std::mt19937;
auto& failure = *new std::string;              // of work whose caller is gone
auto& faults = *new std::vector<std::string>;  // questions about another device than the thread's
thread_local int current = 0;
thread_local int64_t chosen[kDevices] = {0, 0};

Stream& stream_of(int device, int64_t id) {
  std::lock_guard<std::mutex> lock(mutex);
  return streams[id ? id : device];
}
Stream& stream_of(int device) { return stream_of(device, chosen[device]); }

void fail(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex);
  if (failure.empty()) failure = text;
}

void run_until(Stream& stream, uint64_t number);

// One task of a stream that nobody else runs; `lock` is held before and after.
void run_next(Stream& stream, std::unique_lock<std::mutex>& lock) {
  stream.running = true;
  Task task = std::move(stream.queue.front());
  stream.queue.pop_front();
  lock.unlock();
  if (task.other) run_until(*task.other, task.number);
  try {
    if (task.run) task.run();
  } catch (const std::exception& error) {
    fail(error.what());
  }
  task = Task();
  lock.lock();
  stream.running = false;
  ++stream.done;
  moved.notify_all();
}

void run_until(Stream& stream, uint64_t number) {
  std::unique_lock<std::mutex> lock(mutex);
  while (stream.done < number) {
    if (stream.running) moved.wait(lock);
    else run_next(stream, lock);
  }
}

bool ready(const Stream& stream) {
  if (stream.running || stream.queue.empty()) return false;
  const Task& head = stream.queue.front();
  return !head.other || head.other->done >= head.number;
}

// What is done before anybody waits for it.
void go_on(Stream& last) {
  if (order == kNow) return run_until(last, last.issued);
  if (order == kLate) return;
  std::unique_lock<std::mutex> lock(mutex);
  if (order == kSides) {
    for (size_t i = kDevices; i < streams.size(); ++i)
      while (ready(streams[i])) run_next(streams[i], lock);
  } else {
    for (unsigned turns = dice() % 4; turns > 0; --turns) {
      Stream& stream = streams[dice() % streams.size()];
      if (ready(stream)) run_next(stream, lock);
    }
  }
}

uint64_t submit(Stream& stream, Task task) {
  WithoutGil free;
  uint64_t number;
  {
    std::lock_guard<std::mutex> lock(mutex);
    stream.queue.push_back(std::move(task));
    number = ++stream.issued;
  }
  go_on(stream);
  return number;
}
uint64_t submit(Stream& stream, std::function<void()> run) { return submit(stream, Task{std::move(run)}); }

void tell() {  // what went wrong in work that nobody was there to hear of
  std::string text;
  {
    std::lock_guard<std::mutex> lock(mutex);
    text.swap(failure);
  }
  TORCH_CHECK(text.empty(), text);
}

void finish(Stream& stream) {
  WithoutGil free;
  run_until(stream, stream.issued);
}

void finish_device(int device) {
  WithoutGil free;
  for (size_t i = 0; i < streams.size(); ++i)
    if (streams[i].device == device) run_until(streams[i], streams[i].issued);
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void foreign(const char* what, int device) {
  if (device == current) return;
  std::lock_guard<std::mutex> lock(mutex);
  faults.push_back(std::string(what) + " of device " + std::to_string(device) + " while " + std::to_string(current) + " is current");
}

Mark mark(Stream& stream) {
  Mark made;
  made.stream = &stream;
  made.number = submit(stream, [time = made.time] { *time = now(); });
  return made;
}
void wait_for(Stream& stream, const Mark& mark) {
  if (mark.stream && mark.stream != &stream) submit(stream, Task{nullptr, mark.stream, mark.number});
}
bool over(Mark& mark) {  // whoever asks again and again hears of the end some time
  if (!mark.stream) return true;
  foreign("query of an event", mark.stream->device);
  WithoutGil free;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (mark.stream->done >= mark.number) return true;
    if (++mark.asked < 3) return false;
  }
  run_until(*mark.stream, mark.number);
  return true;
}
void finish(Mark& mark) {
  if (!mark.stream) return;
  foreign("wait for an event", mark.stream->device);
  WithoutGil free;
  run_until(*mark.stream, mark.number);
}

// --- memory ---

std::atomic<int64_t> in_use[kDevices], peak[kDevices];
auto& freed = *new std::map<std::pair<Stream*, size_t>, std::vector<void*>>;
struct Range { size_t bytes; bool registered; };
auto& locked = *new std::map<char*, Range>;  // page-locked

struct Block { void* memory; size_t bytes; Stream* stream; };
void give_back(void* context) {
  auto* block = static_cast<Block*>(context);
  in_use[block->stream->device] -= block->bytes;
  if (block->memory) {
    std::lock_guard<std::mutex> lock(mutex);
    freed[{block->stream, block->bytes}].push_back(block->memory);
  }
  delete block;
}
struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t wanted) override {
    size_t bytes = (wanted + 511) / 512 * 512;
    Stream& stream = stream_of(current);
    int device = current;
    bool room = int64_t(bytes) <= kMemory - in_use[device];
    TORCH_CHECK_WITH(OutOfMemoryError, room, "pretend: out of memory, ", wanted, " bytes are asked for");
    void* memory = nullptr;
    if (bytes) {
      {
        std::lock_guard<std::mutex> lock(mutex);
        auto& kept = freed[{&stream, bytes}];
        if (!kept.empty()) { memory = kept.back(); kept.pop_back(); }
      }
      bool fresh = !memory;
      TORCH_CHECK(!fresh || !posix_memalign(&memory, 512, bytes), "pretend: the host has no memory");
      if (fresh) memset(memory, 0xFF, bytes);
      else submit(stream, [memory, bytes] { memset(memory, 0xFF, bytes); });
    }
    int64_t held = in_use[device] += bytes;
    if (held > peak[device]) peak[device] = held;
    return {memory, new Block{memory, bytes, &stream}, &give_back, c10::Device(kType, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t count) const override { memcpy(to, from, count); }
};
DeviceAllocator device_memory;
REGISTER_ALLOCATOR(kType, &device_memory);

void trim() {  // with nothing queued, nobody uses what was freed
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& stream : streams) if (stream.done < stream.issued) return;
  for (auto& [key, blocks] : freed) for (void* block : blocks) free(block);
  freed.clear();
}

void unlock(void* memory) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    locked.erase(static_cast<char*>(memory));
  }
  free(memory);
}
struct LockedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    TORCH_CHECK(!posix_memalign(&memory, 4096, bytes ? bytes : 1), "pretend: the host has no memory");
    std::lock_guard<std::mutex> lock(mutex);
    locked[static_cast<char*>(memory)] = {bytes ? bytes : 1, false};
    return {memory, memory, &unlock, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unlock; }
  void copy_data(void* to, const void* from, std::size_t count) const override { memcpy(to, from, count); }
};
LockedAllocator locked_memory;
bool is_locked(const void* place, bool registered = false) {
  std::lock_guard<std::mutex> lock(mutex);
  auto after = locked.upper_bound(static_cast<char*>(const_cast<void*>(place)));
  if (after == locked.begin()) return false;
  --after;
  return static_cast<const char*>(place) < after->first + after->second.bytes && (!registered || after->second.registered);
}

struct On {  // a device is current for a while
  int before = current;
  explicit On(int device) { current = device; }
  ~On() { current = before; }
};

void resize_bytes(const c10::Storage& storage, size_t bytes) {
  auto* memory = storage.unsafeGetStorageImpl();
  On device(memory->device().index());
  auto fresh = device_memory.allocate(bytes);
  if (size_t kept = std::min<size_t>(memory->nbytes(), bytes))
    submit(stream_of(current), [to = fresh.get(), from = memory->mutable_data(), kept] { memcpy(to, from, kept); });
  memory->set_data_ptr_noswap(std::move(fresh));
  memory->set_nbytes(bytes);
}

// --- what torch asks of a device ---

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static int index(c10::Device d) { return d.has_index() ? d.index() : current; }
  static Stream& get(const c10::Stream& s) { return stream_of(s.device_index(), s.id()); }
  c10::DeviceType type() const override { return kType; }
  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(current)}; }
  c10::Device exchangeDevice(c10::Device d) const override { auto before = getDevice(); current = index(d); return before; }
  void setDevice(c10::Device d) const override { current = index(d); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current = index(d); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Stream getStream(c10::Device d) const override {
    int i = index(d);
    return c10::Stream(c10::Stream::UNSAFE, {kType, static_cast<c10::DeviceIndex>(i)}, chosen[i]);
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getNewStream(c10::Device d, int) const override {
    std::lock_guard<std::mutex> lock(mutex);
    int64_t id = streams.size();
    streams.push_back({id, index(d)});
    return c10::Stream(c10::Stream::UNSAFE, {kType, static_cast<c10::DeviceIndex>(index(d))}, id);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto before = getStream(s.device());
    chosen[s.device_index()] = s.id();
    return before;
  }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Mark;
    *static_cast<Mark*>(*event) = mark(get(s));
  }
  void block(void* event, const c10::Stream& s) const override { if (event) wait_for(get(s), *static_cast<Mark*>(event)); }
  bool queryEvent(void* event) const override { return !event || over(*static_cast<Mark*>(event)); }
  void synchronizeEvent(void* event) const override { if (event) finish(*static_cast<Mark*>(event)); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
  bool queryStream(const c10::Stream& s) const override { return get(s).done >= get(s).issued; }
  void synchronizeStream(const c10::Stream& s) const override { finish(get(s)); }
  void synchronizeDevice(const c10::DeviceIndex d) const override { finish_device(d); }
};
C10_REGISTER_GUARD_IMPL(HPU, Guard);

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(int device) {
    device_ = c10::Device(kType, static_cast<c10::DeviceIndex>(std::max(device, 0)));
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::HPU);
  }
};

struct Hooks final : at::HPUHooksInterface {
  explicit Hooks(at::HPUHooksArgs) {}
  bool hasHPU() const override { return true; }
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static at::Generator made[kDevices] = {at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
    return made[index < 0 ? current : index];
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return at::make_generator<Generator>(index); }
  at::Device getDeviceFromPtr(void*) const override { return {kType, static_cast<c10::DeviceIndex>(current)}; }
  bool isPinnedPtr(const void* place) const override { return is_locked(place); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &locked_memory; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current, device); }
};
}  // namespace
using at::HPUHooksRegistry;
using at::RegistererHPUHooksRegistry;
C10_REGISTER_CLASS(HPUHooksRegistry, HPUHooks, Hooks)
namespace {

// --- operators ---

// Whoever does the work may be in the middle of anything: autograd, autocast and modes have had their turn.
struct Plain {
  c10::impl::ForceDispatchKeyGuard guard{
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset};
};

bool ours(const at::Tensor& t) { return t.defined() && t.device().type() == kType; }

at::Tensor host(const at::Tensor& t) {  // the same memory, for kernels of the CPU
  if (!ours(t)) return t;
  auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  return at::from_blob(t.numel() ? t.data_ptr() : nullptr, t.sizes(), t.strides(), [](void*) {}, options, at::kCPU);
}

at::Tensor fresh_like(const at::Tensor& t, int device) {
  On current_device(device);
  return at::detail::empty_strided_generic(
      t.sizes(), t.strides(), &device_memory, c10::DispatchKeySet(c10::DispatchKey::HPU), t.scalar_type());
}

c10::IValue mapped(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& t : value.toTensorVector()) out.push_back(change(t));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const auto& t : value.toOptionalTensorVector()) out.push_back(t ? std::optional<at::Tensor>(change(*t)) : t);
    return out;
  }
  return value;
}

int device_of(const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  int device = -1;
  std::string elsewhere;
  const auto& names = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto look = [&](const at::Tensor& t) {
      if (ours(t)) {
        TORCH_CHECK(device < 0 || device == t.device().index(), "Expected all tensors to be on the same device: ",
                    op.schema().name(), " has tensors of hpu:", device, " and ", t.device());
        device = t.device().index();
      } else if (t.defined() && t.is_cpu() && t.dim()) {
        elsewhere += names[i].name() + " ";
      }
      return t;
    };
    if (!arguments[i].isOptionalTensorList()) mapped(arguments[i], look);  // indices may be on the CPU
  }
  TORCH_CHECK(device < 0 || elsewhere.empty() || op.schema().name().find("index") != std::string::npos,
              "Expected all tensors to be on the same device: ", op.schema().name(), " has on the cpu ", elsewhere);
  return device < 0 ? current : device;
}

// Run on views of the host: what the queue comes to, or what has to be known now.
std::vector<c10::IValue> run_on_host(const c10::OperatorHandle& op, torch::jit::Stack stack) {
  Plain plain;
  op.callBoxed(&stack);
  return stack;
}

bool can_wait(const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  for (auto tag : {at::Tag::data_dependent_output, at::Tag::dynamic_output_shape, at::Tag::nondeterministic_seeded})
    if (op.hasTag(tag)) return false;
  for (const auto& argument : arguments)
    if (argument.isDevice() || argument.isGenerator()) return false;
  for (const auto& result : op.schema().returns())
    if (!result.type()->isSubtypeOf(*c10::TensorType::get()) && !result.type()->isSubtypeOf(*c10::ListType::ofTensors()))
      return false;
  return true;
}

// What results look like follows from this.
std::string looks(const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  std::ostringstream text;
  text << op.schema().name() << '.' << op.schema().overload_name();
  for (const auto& argument : arguments) {
    bool plain = true;
    mapped(argument, [&](const at::Tensor& t) {
      plain = false;
      if (t.defined()) text << '|' << t.sizes() << t.strides() << int(t.scalar_type()) << t.is_cpu();
      return t;
    });
    if (plain) text << '|' << argument;
    else text << ';';
  }
  return text.str();
}

// Results, as meta tensors that look like them: what the same kernel makes of zeros. False where it raises: what it says
// of the real values is better.
bool foretell(const c10::OperatorHandle& op, const torch::jit::Stack& arguments, torch::jit::Stack& results, bool keep) {
  static auto* known = new std::map<std::string, torch::jit::Stack>;
  static std::mutex reading;
  std::string text = keep ? looks(op, arguments) : "";
  if (keep) {
    std::lock_guard<std::mutex> lock(reading);
    if (auto found = known->find(text); found != known->end()) { results = found->second; return true; }
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> made;  // zeros, real
  auto zeros = [&](const at::Tensor& t) {
    if (!ours(t)) return t;
    made.emplace_back(at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kCPU)).zero_(), t);
    return made.back().first;
  };
  try {
    Plain plain;
    torch::jit::Stack stack;
    for (const auto& argument : arguments) stack.push_back(mapped(argument, zeros));
    op.callBoxed(&stack);
    for (auto& [zero, real] : made)  // an argument for results that had another shape
      if (!zero.sizes().equals(real.sizes())) real.resize_(zero.sizes());
    for (const auto& value : stack)
      results.push_back(mapped(value, [&](const at::Tensor& t) {
        for (auto& [zero, real] : made) if (t.is_same(zero)) { keep = false; return real; }
        return t.defined() ? at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta)) : t;
      }));
    std::lock_guard<std::mutex> lock(reading);
    if (keep) (*known)[text] = results;
    return true;
  } catch (const std::exception&) {
    results.clear();
    return false;
  }
}

void put(const c10::IValue& from, const c10::IValue& to) {  // values that the CPU's kernel has made
  std::vector<at::Tensor> values, places;
  mapped(from, [&](const at::Tensor& t) { values.push_back(t); return t; });
  mapped(to, [&](const at::Tensor& t) { places.push_back(t); return t; });
  for (size_t i = 0; i < places.size(); ++i)
    if (places[i].defined() && values.at(i).defined() && !places[i].is_same(values[i])) {
      TORCH_CHECK(places[i].sizes().equals(values[i].sizes()), "pretend: a kernel makes another shape of these values than of zeros");
      places[i].copy_(values[i]);
    }
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  size_t count = op.schema().arguments().size();
  torch::jit::Stack arguments(stack->end() - count, stack->end());
  torch::jit::drop(*stack, count);
  On device(device_of(op, arguments));
  Stream& stream = stream_of(current);
  const auto& returns = op.schema().returns();
  std::vector<int> given(returns.size(), -1);  // the argument that a result is
  bool resizable = false, made = false;
  for (size_t i = 0; i < count; ++i) {
    const auto* alias = op.schema().arguments()[i].alias_info();
    resizable |= op.schema().arguments()[i].is_out();
    for (size_t r = 0; alias && r < returns.size(); ++r)
      if (returns[r].alias_info() && returns[r].alias_info()->beforeSets() == alias->beforeSets()) given[r] = int(i);
  }
  for (size_t r = 0; r < returns.size(); ++r) {
    made |= given[r] < 0;
    const auto* alias = given[r] < 0 ? nullptr : op.schema().arguments()[given[r]].alias_info();
    TORCH_CHECK(!alias || alias->isWrite(), "pretend: ", op.schema().name(), " makes a view, which this device does not know");
  }
  torch::jit::Stack results, inputs;
  bool late = order != kNow && can_wait(op, arguments) && (!(made || resizable) || foretell(op, arguments, results, !resizable));
  for (size_t i = 0; i < count; ++i) {
    if (arguments[i].isDevice()) { inputs.push_back(c10::Device(at::kCPU)); continue; }
    bool out = !late && op.schema().arguments()[i].is_out();
    inputs.push_back(mapped(arguments[i], [&](const at::Tensor& t) {
      if (out && ours(t)) return at::empty_strided({0}, {1}, t.options().device(at::kCPU));
      return late && t.defined() && t.is_cpu() ? t.clone() : host(t);  // small ones of the host are read at once
    }));
  }
  if (!late) {
    finish(stream);
    torch::jit::Stack found;
    {
      WithoutGil free;
      found = run_on_host(op, inputs);
    }
    for (size_t r = 0; r < returns.size(); ++r) {
      if (given[r] >= 0) { stack->push_back(arguments[given[r]]); continue; }
      stack->push_back(mapped(found[r], [&](const at::Tensor& t) {
        if (!t.defined()) return t;
        auto out = fresh_like(t, current);
        submit(stream, [to = host(out), t] { Plain plain; to.copy_(t); });
        return out;
      }));
    }
    if (resizable)
      for (size_t i = 0; i < count; ++i)
        if (op.schema().arguments()[i].is_out() && arguments[i].isTensor() && ours(arguments[i].toTensor())) {
          at::Tensor out = arguments[i].toTensor(), value = inputs[i].toTensor();
          if (!out.sizes().equals(value.sizes())) out.resize_(value.sizes());
          submit(stream, [to = host(out), value] { Plain plain; to.copy_(value); });
        }
    return;
  }
  if (resizable)
    for (size_t i = 0; i < count; ++i) if (op.schema().arguments()[i].is_out()) inputs[i] = mapped(arguments[i], host);
  std::vector<std::pair<size_t, c10::IValue>> places;
  for (size_t r = 0; r < returns.size(); ++r) {
    if (given[r] >= 0) { stack->push_back(arguments[given[r]]); continue; }
    stack->push_back(mapped(results[r], [&](const at::Tensor& t) {
      return t.defined() && t.is_meta() ? fresh_like(t, current) : t;
    }));
    places.emplace_back(r, mapped(stack->back(), host));
  }
  submit(stream, [op, inputs = std::move(inputs), places = std::move(places)]() mutable {
    auto found = run_on_host(op, std::move(inputs));
    Plain plain;
    for (auto& [r, place] : places) put(found.at(r), place);
  });
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  On on(device ? Guard::index(*device) : current);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_memory,
                                   c10::DispatchKeySet(c10::DispatchKey::HPU), c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  On on(device ? Guard::index(*device) : current);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_memory,
                                           c10::DispatchKeySet(c10::DispatchKey::HPU), c10::dtype_or_default(dtype));
}
const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* tensor = self.unsafeGetTensorImpl();
  size_t bytes = at::detail::computeStorageNbytesContiguous(sizes, self.itemsize(), self.storage_offset());
  if (bytes > self.storage().nbytes()) resize_bytes(self.storage(), bytes);
  tensor->set_sizes_contiguous(sizes);
  return self;
}

// As CUDA copies: beside the program only what is page-locked, whole and of one dtype. What is not page-locked, or has
// to be converted first, is read at once on its way to the device; on its way to the host the program waits.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  bool up = !ours(from), down = !ours(to);
  On device(ours(to) ? to.device().index() : from.device().index());
  Stream& stream = stream_of(current);
  auto source = host(from), target = host(to);
  bool whole = from.dtype() == to.dtype() && source.is_contiguous() && target.is_contiguous() && source.numel() == target.numel();
  const at::Tensor& outside = up ? source : target;
  bool beside = non_blocking && whole && outside.numel() && is_locked(outside.data_ptr());
  if (up && non_blocking && !beside) {
    Plain plain;
    source = source.clone();
  }
  if (beside && is_locked(outside.data_ptr(), true)) {  // nobody keeps registered memory for the device
    auto raw = [](const at::Tensor& t) { return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), [](void*) {}, t.options(), at::kCPU); };
    source = raw(source);
    target = raw(target);
  }
  if (!up && !down && from.device() != to.device()) finish_device(from.device().index());
  submit(stream, [source, target] { Plain plain; target.copy_(source); });
  if ((up || down) && !beside && !(up && non_blocking)) {
    finish(stream);
    tell();
  }
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (!to.sizes().equals(from.sizes())) to.resize_(from.sizes());
  return copy_from(from, to, false);
}
at::Scalar read(const at::Tensor& t) {
  finish(stream_of(t.device().index()));
  tell();
  return at::_local_scalar_dense(host(t));
}
void record_stream(at::Tensor&, c10::Stream) {}
int64_t which_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double,
                        bool, std::optional<double>, bool) { return 0; }  // by plain operators

TORCH_LIBRARY_IMPL(_, HPU, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, HPU, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(read));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("_fused_sdp_choice", TORCH_FN(which_attention));
}
int (*call_python)(int64_t) = nullptr;
}  // namespace

// For ctypes. Those that wait return 1 where work has failed; `pretend_failure` says how.
extern "C" {
void pretend_order(int which, unsigned seed) { order = which; dice.seed(seed); }
void pretend_set_device(int device) { current = device; home = device; }
int pretend_exchange_device(int device) { return std::exchange(current, device); }
int pretend_current_device() { return current; }
int64_t pretend_new_stream(int device) { return Guard().getNewStream({kType, static_cast<c10::DeviceIndex>(device)}, 0).id(); }
int64_t pretend_current_stream(int device) { return chosen[device]; }
void pretend_choose_stream(int device, int64_t id) { chosen[device] = id; }
void* pretend_new_event() { return new Mark; }
void pretend_free_event(void* event) { delete static_cast<Mark*>(event); }
void pretend_record(void* event, int device, int64_t id) { *static_cast<Mark*>(event) = mark(stream_of(device, id)); }
void pretend_wait(void* event, int device, int64_t id) { wait_for(stream_of(device, id), *static_cast<Mark*>(event)); }
int pretend_query(void* event) { return over(*static_cast<Mark*>(event)); }
void pretend_finish_event(void* event) { finish(*static_cast<Mark*>(event)); }
double pretend_time(void* event) { return *static_cast<Mark*>(event)->time; }
void pretend_finish_stream(int device, int64_t id) { finish(stream_of(device, id)); }
int pretend_idle(int device, int64_t id) { auto& s = stream_of(device, id); return s.done >= s.issued; }
void pretend_finish_device(int device) { finish_device(device); trim(); }
void pretend_callback(int (*call)(int64_t)) { call_python = call; }
void pretend_submit(int device, int64_t id, int64_t number) {
  submit(stream_of(device, id), [number] { TORCH_CHECK(!call_python(number), "pretend: a task of Python has failed"); });
}
int pretend_failure(char* out, int room) {
  std::lock_guard<std::mutex> lock(mutex);
  if (failure.empty()) return 0;
  snprintf(out, room, "%s", failure.c_str());
  failure.clear();
  return 1;
}
int pretend_fault(char* out, int room) {
  std::lock_guard<std::mutex> lock(mutex);
  if (faults.empty()) return 0;
  snprintf(out, room, "%s", faults.back().c_str());
  faults.pop_back();
  return 1;
}
int64_t pretend_in_use(int device) { return in_use[device]; }
int64_t pretend_peak(int device) { return peak[device]; }
void pretend_reset_peak(int device) { peak[device] = in_use[device].load(); }
void pretend_lock(uintptr_t place, size_t bytes) {
  foreign("page-locking for a process", home);
  std::lock_guard<std::mutex> lock(mutex);
  locked[reinterpret_cast<char*>(place)] = {bytes, true};
}
void pretend_unlock(uintptr_t place) {
  std::lock_guard<std::mutex> lock(mutex);
  locked.erase(reinterpret_cast<char*>(place));
}
}

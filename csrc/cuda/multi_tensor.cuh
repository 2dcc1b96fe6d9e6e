// One optimizer update over many tensors: few launches whatever their number, one pass over memory, fp32 arithmetic.
//
// A launch takes its table of tensors by value, so nothing is copied to the device first and a captured launch stays valid as
// long as the tensors do. A block works on one chunk of one tensor. The arithmetic is that of csrc/cpu, operation by
// operation: fused multiply-add only where it is written (--fmad=false), IEEE division and square root. So host and device
// give the same bits, and an element's result does not depend on where it stands.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace ds {

constexpr int kThreads = 256;
constexpr int kTensors = 64;  // per launch: the table must fit the 4 KiB of kernel parameters
constexpr int kChunk = 8192;  // elements per block
constexpr int kStepsPerLaunch = 256;

enum Column { kParam = 0, kGrad = 1, kFirst = 2, kSecond = 3, kOut = 4, kColumns = 5 };

// Everything that depends on the number of the update. One for the call, or one per tensor on the device.
struct Row {
    float lr, rate, root, keep, scale, correct1, correct2, unused;
};

// What the caller hands over; deepspeed/optim/cuda.py declares the same fields. Host memory but for what says device.
struct Call {
    int64_t bytes;  // sizeof(Call) as the caller knows it
    void* stream;
    const int64_t* sizes;
    void* const* columns[kColumns];  // `count` device pointers each; null for a column that is not there
    const float* const* steps;       // `count` device pointers; null: `step` for all
    const float* device_lr;          // device; null: `lr`
    const float* device_scale;       // device; null: `scale`
    const float* found_inf;          // device; anything but 0 there: change nothing
    Row* rows;                       // device, `count` of them; needed with any of steps, device_lr, device_scale
    double* partials;                // device, LAMB only
    float* ratios;                   // device, `count` of them, LAMB only
    int64_t partial_count;
    double step, lr, scale, beta1, beta2, eps, weight_decay, min_coeff, max_coeff;
    int32_t device, count, param_code, grad_code, moment_code, out_code;  // 0 fp32, 1 bf16, 2 fp16; -1: no output
    int32_t decoupled, bias_correction, eps_inside_sqrt, unused;
};

struct Settings {
    const Row* rows;
    const float* found_inf;
    Row row;
    float one1, one2, eps, decay;
    int out_code;
};

struct Table {
    void* at[kColumns][kTensors];
    int64_t size[kTensors];
    int32_t first[kTensors + 1];  // blocks before each tensor
    int32_t base;                 // tensors in earlier launches
    int32_t count;
};

static_assert(sizeof(Table) + sizeof(Settings) + 64 <= 4096, "kernel parameters are limited to 4 KiB");

// ---- numbers ----

struct F32 {
    float value;
    static __device__ __forceinline__ float get(F32 x) { return x.value; }
    static __device__ __forceinline__ F32 make(float x) { return {x}; }
};

struct BF16 {
    unsigned short bits;
    static __device__ __forceinline__ float get(BF16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
    static __device__ __forceinline__ BF16 make(float x) { return {__bfloat16_as_ushort(__float2bfloat16_rn(x))}; }
};

struct F16 {
    unsigned short bits;
    static __device__ __forceinline__ float get(F16 x) { return __half2float(__ushort_as_half(x.bits)); }
    static __device__ __forceinline__ F16 make(float x) { return {__half_as_ushort(__float2half_rn(x))}; }
};

template <int kBytes>
struct Word;
template <> struct Word<2> { using Type = unsigned short; };
template <> struct Word<4> { using Type = unsigned; };
template <> struct Word<8> { using Type = uint2; };
template <> struct Word<16> { using Type = uint4; };
template <> struct Word<32> { struct alignas(16) Type { uint4 low, high; }; };

template <int W, class T>
__device__ __forceinline__ void load(const T* from, float (&to)[W]) {
    const auto word = *reinterpret_cast<const typename Word<W * sizeof(T)>::Type*>(from);
    T each[W];
    memcpy(each, &word, sizeof each);
#pragma unroll
    for (int j = 0; j < W; ++j) to[j] = T::get(each[j]);
}

template <int W, class T>
__device__ __forceinline__ void store(T* to, const float (&from)[W]) {
    T each[W];
#pragma unroll
    for (int j = 0; j < W; ++j) each[j] = T::make(from[j]);
    typename Word<W * sizeof(T)>::Type word;
    memcpy(&word, each, sizeof each);
    *reinterpret_cast<typename Word<W * sizeof(T)>::Type*>(to) = word;
}

// ---- the walk over one chunk ----

struct Piece {
    void* at[kColumns];
    int64_t start;
    int tensor, count, out_code;

    template <class T>
    __device__ __forceinline__ T* column(Column which) const {
        return static_cast<T*>(at[which]) + start;
    }

    template <class T>
    __device__ __forceinline__ bool aligned(Column which, int width) const {
        return reinterpret_cast<uintptr_t>(at[which]) % (width * sizeof(T)) == 0;
    }

    __device__ __forceinline__ bool out_aligned(int width) const {
        return out_code < 0 || (out_code == 0 ? aligned<F32>(kOut, width) : aligned<F16>(kOut, width));
    }

    template <int W>
    __device__ __forceinline__ void write_out(int i, const float (&value)[W]) const {
        if (out_code == 1) store<W>(column<BF16>(kOut) + i, value);
        if (out_code == 2) store<W>(column<F16>(kOut) + i, value);
        if (out_code == 0) store<W>(column<F32>(kOut) + i, value);
    }
};

// The chunk of this block.
__device__ __forceinline__ Piece find_piece(const Table& table, int out_code) {
    const int block = blockIdx.x;
    int low = 0, high = table.count;  // the last tensor whose first block is not after this one: never an empty tensor
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (table.first[middle] <= block)
            low = middle;
        else
            high = middle;
    }
    Piece piece;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) piece.at[c] = table.at[c][low];
    piece.start = static_cast<int64_t>(block - table.first[low]) * kChunk;
    const int64_t left = table.size[low] - piece.start;
    piece.count = left < kChunk ? static_cast<int>(left) : kChunk;
    piece.tensor = table.base + low;
    piece.out_code = out_code;
    return piece;
}

// Rule: rule(param, grad, first, second) on one element; kReadsGrad, kHasSecond, kWritesParam, kWritesMoments say what it needs.
template <int W, class P, class G, class M, class Rule>
__device__ __forceinline__ void walk(const Piece& piece, int begin, int end, Rule& rule) {
    for (int i = begin + static_cast<int>(threadIdx.x) * W; i < end; i += kThreads * W) {
        float param[W], grad[W], first[W], second[W];
        load<W>(piece.column<P>(kParam) + i, param);
        load<W>(piece.column<M>(kFirst) + i, first);
        if constexpr (Rule::kReadsGrad) load<W>(piece.column<G>(kGrad) + i, grad);
        if constexpr (Rule::kHasSecond) load<W>(piece.column<M>(kSecond) + i, second);
#pragma unroll
        for (int j = 0; j < W; ++j) rule(param[j], grad[j], first[j], second[j]);
        if constexpr (Rule::kWritesMoments) {
            store<W>(piece.column<M>(kFirst) + i, first);
            if constexpr (Rule::kHasSecond) store<W>(piece.column<M>(kSecond) + i, second);
        }
        if constexpr (Rule::kWritesParam) {
            store<W>(piece.column<P>(kParam) + i, param);
            piece.write_out<W>(i, param);
        }
    }
}

// 16 bytes at once of the widest column where all are aligned for it, else element by element.
template <class P, class G, class M, class Rule>
__device__ __forceinline__ void update(const Piece& piece, Rule& rule) {
    constexpr int kWidest = sizeof(P) > sizeof(M) ? sizeof(P) : sizeof(M);
    constexpr int W = 16 / (Rule::kReadsGrad && static_cast<int>(sizeof(G)) > kWidest ? sizeof(G) : kWidest);
    bool wide = piece.aligned<P>(kParam, W) && piece.aligned<M>(kFirst, W);
    if constexpr (Rule::kReadsGrad) wide = wide && piece.aligned<G>(kGrad, W);
    if constexpr (Rule::kHasSecond) wide = wide && piece.aligned<M>(kSecond, W);
    if constexpr (Rule::kWritesParam) wide = wide && piece.out_aligned(W);
    const int whole = wide ? piece.count / W * W : 0;
    walk<W, P, G, M>(piece, 0, whole, rule);
    walk<1, P, G, M>(piece, whole, piece.count, rule);
}

__device__ __forceinline__ bool skipped(const float* found_inf) { return found_inf != nullptr && *found_inf != 0.0f; }

__device__ __forceinline__ Row row_of(const Settings& s, int tensor) { return s.rows != nullptr ? s.rows[tensor] : s.row; }

// ---- the numbers of one update ----

struct Plan {
    double lr, scale, beta1, beta2, weight_decay;
    int decoupled, bias_correction;
};

// The same expressions in double precision as deepspeed/optim/host.py, on the host or, when captured, on the device.
__host__ __device__ inline Row make_row(const Plan& plan, double step, double lr, double scale) {
    const double correct1 = plan.bias_correction ? 1.0 - pow(plan.beta1, step) : 1.0;
    const double correct2 = plan.bias_correction ? 1.0 - pow(plan.beta2, step) : 1.0;
    Row row;
    row.lr = static_cast<float>(lr);
    row.rate = static_cast<float>(lr / correct1);
    row.root = static_cast<float>(sqrt(correct2));
    row.keep = static_cast<float>(plan.decoupled ? 1.0 - lr * plan.weight_decay : 1.0);
    row.scale = static_cast<float>(scale);
    row.correct1 = static_cast<float>(correct1);
    row.correct2 = static_cast<float>(correct2);
    row.unused = 0.0f;
    return row;
}

struct Steps {
    const float* at[kStepsPerLaunch];
};

static __global__ void make_rows(const __grid_constant__ Steps steps, Plan plan, double step, const float* lr, const float* scale, Row* rows,
                                 int count) {
    const int i = threadIdx.x;
    if (i >= count) return;
    const float* own = steps.at[i];
    rows[i] = make_row(plan, own != nullptr ? *own : step, lr != nullptr ? *lr : plan.lr, scale != nullptr ? *scale : plan.scale);
}

// ---- launching ----

inline cudaStream_t stream_of(const Call& call) { return static_cast<cudaStream_t>(call.stream); }

// Checks the call, selects its device and gets the numbers of the update ready; `settings` is filled then.
inline cudaError_t begin(const Call& call, Settings* settings) {
    if (call.bytes != static_cast<int64_t>(sizeof(Call)) || call.count < 0) return cudaErrorInvalidValue;
    // the caller's runtime and this one (linked statically) each remember a device
    const cudaError_t error = cudaSetDevice(call.device);
    if (error != cudaSuccess) return error;
    const Plan plan{call.lr, call.scale, call.beta1, call.beta2, call.weight_decay, call.decoupled, call.bias_correction};
    *settings = Settings{nullptr, call.found_inf, Row{}, static_cast<float>(1.0 - call.beta1), static_cast<float>(1.0 - call.beta2),
                         static_cast<float>(call.eps), static_cast<float>(call.decoupled ? 0.0 : call.weight_decay), call.out_code};
    if (call.steps == nullptr && call.device_lr == nullptr && call.device_scale == nullptr) {
        settings->row = make_row(plan, call.step, call.lr, call.scale);
        return cudaSuccess;
    }
    if (call.rows == nullptr) return cudaErrorInvalidValue;
    settings->rows = call.rows;
    for (int base = 0; base < call.count; base += kStepsPerLaunch) {
        const int count = call.count - base < kStepsPerLaunch ? call.count - base : kStepsPerLaunch;
        Steps steps{};
        if (call.steps != nullptr) std::memcpy(steps.at, call.steps + base, count * sizeof(float*));
        make_rows<<<1, kStepsPerLaunch, 0, stream_of(call)>>>(steps, plan, call.step, call.device_lr, call.device_scale, call.rows + base,
                                                             count);
    }
    return cudaGetLastError();
}

// launch(table, blocks) for every kTensors tensors; it may not be called with 0 blocks.
template <class Launch>
cudaError_t in_batches(const Call& call, Launch launch) {
    for (int base = 0; base < call.count; base += kTensors) {
        Table table{};
        table.base = base;
        table.count = call.count - base < kTensors ? call.count - base : kTensors;
        int64_t blocks = 0;
        for (int t = 0; t < table.count; ++t) {
            table.size[t] = call.sizes[base + t];
            for (int c = 0; c < kColumns; ++c) table.at[c][t] = call.columns[c] != nullptr ? call.columns[c][base + t] : nullptr;
            table.first[t] = static_cast<int32_t>(blocks);
            blocks += (table.size[t] + kChunk - 1) / kChunk;
            if (blocks > INT32_MAX) return cudaErrorInvalidValue;
        }
        table.first[table.count] = static_cast<int32_t>(blocks);
        if (blocks > 0) launch(table, static_cast<int>(blocks));
        const cudaError_t error = cudaGetLastError();
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

// What is compiled, 11 of 27 combinations: beside fp32 parameters fp32 moments and any gradient (the masters of an engine),
// beside 16-bit ones moments and gradients like them or in fp32. deepspeed/optim/cuda.py knows the same.
template <class P, class Other>
constexpr bool kBeside = std::is_same_v<Other, F32> || std::is_same_v<Other, P>;

template <template <class, class, class> class Run, class P, class G, class M>
cudaError_t by_all(const Call& call, const Settings& settings) {
    if constexpr (kBeside<P, M> && (std::is_same_v<P, F32> || kBeside<P, G>)) return Run<P, G, M>::run(call, settings);
    return cudaErrorInvalidValue;
}

// Run<P, G, M>::run(call, settings) for the call's dtypes.
template <template <class, class, class> class Run, class P, class G>
cudaError_t by_moment(const Call& call, const Settings& settings) {
    switch (call.moment_code) {
        case 0: return by_all<Run, P, G, F32>(call, settings);
        case 1: return by_all<Run, P, G, BF16>(call, settings);
        case 2: return by_all<Run, P, G, F16>(call, settings);
        default: return cudaErrorInvalidValue;
    }
}

template <template <class, class, class> class Run, class P>
cudaError_t by_grad(const Call& call, const Settings& settings) {
    switch (call.grad_code) {
        case 0: return by_moment<Run, P, F32>(call, settings);
        case 1: return by_moment<Run, P, BF16>(call, settings);
        case 2: return by_moment<Run, P, F16>(call, settings);
        default: return cudaErrorInvalidValue;
    }
}

template <template <class, class, class> class Run>
int by_codes(const Call* call) {
    if (call->out_code < -1 || call->out_code > 2) return cudaErrorInvalidValue;
    Settings settings;
    const cudaError_t error = begin(*call, &settings);
    if (error != cudaSuccess) return error;
    switch (call->param_code) {
        case 0: return by_grad<Run, F32>(*call, settings);
        case 1: return by_grad<Run, BF16>(*call, settings);
        case 2: return by_grad<Run, F16>(*call, settings);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace ds

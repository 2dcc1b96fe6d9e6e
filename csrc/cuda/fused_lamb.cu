// LAMB over many tensors (You et al. 2020). The rule is that of deepspeed/optim/lamb.py, in fp32 whatever the dtypes.
//
// Three kernels: the moments and each block's sums of squares of the weight and of the update; one trust ratio per tensor
// from these sums, added in a fixed order; the weights. The last one computes the update again from the moments as they were
// stored: reading them costs what reading a stored update would, and needs no memory.

#include "cuda/multi_tensor.cuh"

namespace {

using namespace ds;

struct Direction {
    float correct1, correct2, eps, decay;
    bool inside;

    __device__ Direction(const Settings& s, const Row& row, bool eps_inside_sqrt)
        : correct1(row.correct1), correct2(row.correct2), eps(s.eps), decay(s.decay), inside(eps_inside_sqrt) {}

    __device__ __forceinline__ float operator()(float param, float first, float second) const {
        const float corrected = second / correct2;
        const float divisor = inside ? sqrtf(corrected + eps) : sqrtf(corrected) + eps;
        return fmaf(decay, param, first / correct1 / divisor);
    }
};

template <class M>
struct MomentRule {
    static constexpr bool kReadsGrad = true, kHasSecond = true, kWritesParam = false, kWritesMoments = true;
    Direction direction;
    float scale, one1, one2, beta2;
    float weights = 0.0f, updates = 0.0f;

    __device__ MomentRule(const Settings& s, const Row& row, bool inside)
        : direction(s, row, inside), scale(row.scale), one1(s.one1), one2(s.one2), beta2(1.0f - s.one2) {}

    __device__ __forceinline__ void operator()(float& param, float grad, float& first, float& second) {
        const float g = grad * scale;
        first = M::get(M::make(fmaf(one1, g - first, first)));
        second = M::get(M::make(fmaf(one2 * g, g, beta2 * second)));
        const float toward = direction(param, first, second);
        weights = fmaf(param, param, weights);
        updates = fmaf(toward, toward, updates);
    }
};

struct WeightRule {
    static constexpr bool kReadsGrad = false, kHasSecond = true, kWritesParam = true, kWritesMoments = false;
    Direction direction;
    float lr, ratio;

    __device__ WeightRule(const Settings& s, const Row& row, bool inside, float trust) : direction(s, row, inside), lr(row.lr), ratio(trust) {}

    __device__ __forceinline__ void operator()(float& param, float, float& first, float& second) const {
        param = fmaf(-lr, direction(param, first, second) * ratio, param);
    }
};

struct Trust {
    double* partials;
    float* ratios;
    float low, high;
    int inside;
};

// Sum over the block, in thread 0; the order is fixed. Every thread must come here.
__device__ double block_sum(double value) {
    __shared__ double sums[kThreads];
    sums[threadIdx.x] = value;
    for (int half = kThreads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    const double total = sums[0];
    __syncthreads();  // the next sum uses the same memory
    return total;
}

template <class P, class G, class M>
__global__ void __launch_bounds__(kThreads) lamb_moments(const __grid_constant__ Table table, const __grid_constant__ Settings settings,
                                                         const Trust trust) {
    if (skipped(settings.found_inf)) return;
    const Piece piece = find_piece(table, -1);
    MomentRule<M> rule(settings, row_of(settings, piece.tensor), trust.inside);
    update<P, G, M>(piece, rule);
    const double weights = block_sum(rule.weights), updates = block_sum(rule.updates);
    if (threadIdx.x == 0) {
        trust.partials[2 * blockIdx.x] = weights;
        trust.partials[2 * blockIdx.x + 1] = updates;
    }
}

// One block per tensor.
__global__ void __launch_bounds__(kThreads) lamb_ratios(const __grid_constant__ Table table, const float* found_inf, const Trust trust) {
    if (skipped(found_inf)) return;
    double weights = 0.0, updates = 0.0;
    for (int i = table.first[blockIdx.x] + threadIdx.x; i < table.first[blockIdx.x + 1]; i += kThreads) {
        weights += trust.partials[2 * i];
        updates += trust.partials[2 * i + 1];
    }
    const float weight_norm = static_cast<float>(sqrt(block_sum(weights))), update_norm = static_cast<float>(sqrt(block_sum(updates)));
    if (threadIdx.x != 0) return;
    float ratio = 1.0f;
    if (weight_norm > 0.0f && update_norm > 0.0f) {
        ratio = weight_norm / update_norm;
        ratio = ratio < trust.low ? trust.low : ratio > trust.high ? trust.high : ratio;  // not-a-number stays
    }
    trust.ratios[table.base + blockIdx.x] = ratio;
}

template <class P, class M>
__global__ void __launch_bounds__(kThreads, 4) lamb_weights(const __grid_constant__ Table table, const __grid_constant__ Settings settings,
                                                         const Trust trust) {
    if (skipped(settings.found_inf)) return;
    const Piece piece = find_piece(table, settings.out_code);
    WeightRule rule(settings, row_of(settings, piece.tensor), trust.inside, trust.ratios[piece.tensor]);
    update<P, F32, M>(piece, rule);
}

template <class P, class G, class M>
struct Lamb {
    static cudaError_t run(const Call& call, const Settings& settings) {
        if (call.ratios == nullptr) return cudaErrorInvalidValue;
        const Trust trust{call.partials, call.ratios, static_cast<float>(call.min_coeff), static_cast<float>(call.max_coeff),
                          call.eps_inside_sqrt};
        bool enough = true;
        const cudaError_t error = in_batches(call, [&](const Table& table, int blocks) {
            // the stream orders the launches, so every batch can use the same partial sums
            enough = enough && 2 * static_cast<int64_t>(blocks) <= call.partial_count;
            if (!enough) return;
            lamb_moments<P, G, M><<<blocks, kThreads, 0, stream_of(call)>>>(table, settings, trust);
            lamb_ratios<<<table.count, kThreads, 0, stream_of(call)>>>(table, settings.found_inf, trust);
            lamb_weights<P, M><<<blocks, kThreads, 0, stream_of(call)>>>(table, settings, trust);
        });
        return enough ? error : cudaErrorInvalidValue;
    }
};

}  // namespace

extern "C" {

// A cudaError_t; 0 when the work is in the stream. The decay must not be decoupled: here it is part of the update.
int ds_fused_lamb(const ds::Call* call) { return ds::by_codes<Lamb>(call); }

const char* ds_fused_lamb_error(int error) { return cudaGetErrorName(static_cast<cudaError_t>(error)); }
}

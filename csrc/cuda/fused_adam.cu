// Adam and AdamW over many tensors (Kingma and Ba 2015; Loshchilov and Hutter 2019). The rule is that of csrc/cpu/adam.cpp.

#include "cuda/multi_tensor.cuh"

namespace {

using namespace ds;

struct AdamRule {
    static constexpr bool kReadsGrad = true, kHasSecond = true, kWritesParam = true, kWritesMoments = true;
    Row row;
    float one1, one2, beta2, eps, decay;

    __device__ AdamRule(const Settings& s, const Row& own)
        : row(own), one1(s.one1), one2(s.one2), beta2(1.0f - s.one2), eps(s.eps), decay(s.decay) {}

    __device__ __forceinline__ void operator()(float& param, float grad, float& first, float& second) const {
        const float own = grad * row.scale;
        const float g = decay != 0.0f ? fmaf(decay, param, own) : own;
        first = fmaf(one1, g - first, first);
        second = fmaf(one2 * g, g, beta2 * second);
        const float denominator = sqrtf(second) / row.root + eps;
        param = fmaf(-row.rate, first / denominator, param * row.keep);
    }
};

template <class P, class G, class M>
__global__ void __launch_bounds__(kThreads) adam(const __grid_constant__ Table table, const __grid_constant__ Settings settings) {
    if (skipped(settings.found_inf)) return;
    const Piece piece = find_piece(table, settings.out_code);
    AdamRule rule(settings, row_of(settings, piece.tensor));
    update<P, G, M>(piece, rule);
}

template <class P, class G, class M>
struct Adam {
    static cudaError_t run(const Call& call, const Settings& settings) {
        return in_batches(call, [&](const Table& table, int blocks) {
            adam<P, G, M><<<blocks, kThreads, 0, stream_of(call)>>>(table, settings);
        });
    }
};

}  // namespace

extern "C" {

// A cudaError_t; 0 when the work is in the stream.
int ds_fused_adam(const ds::Call* call) { return ds::by_codes<Adam>(call); }

const char* ds_fused_adam_error(int error) { return cudaGetErrorName(static_cast<cudaError_t>(error)); }
}

// Lion over many tensors (Chen et al. 2023). The rule is that of csrc/cpu/lion.cpp.

#include "cuda/multi_tensor.cuh"

namespace {

using namespace ds;

struct LionRule {
    static constexpr bool kReadsGrad = true, kHasSecond = false, kWritesParam = true, kWritesMoments = true;
    Row row;
    float one1, one2;

    __device__ LionRule(const Settings& s, const Row& own) : row(own), one1(s.one1), one2(s.one2) {}

    __device__ __forceinline__ void operator()(float& param, float grad, float& first, float&) const {
        const float g = grad * row.scale;
        const float toward = fmaf(one1, g - first, first);
        // The sign; zero stays zero, and not-a-number goes on into the weight.
        const float sign = toward > 0.0f ? 1.0f : toward < 0.0f ? -1.0f : toward;
        param = fmaf(-row.lr, sign, param * row.keep);
        first = fmaf(one2, g - first, first);
    }
};

template <class P, class G, class M>
__global__ void __launch_bounds__(kThreads) lion(const __grid_constant__ Table table, const __grid_constant__ Settings settings) {
    if (skipped(settings.found_inf)) return;
    const Piece piece = find_piece(table, settings.out_code);
    LionRule rule(settings, row_of(settings, piece.tensor));
    update<P, G, M>(piece, rule);
}

template <class P, class G, class M>
struct Lion {
    static cudaError_t run(const Call& call, const Settings& settings) {
        return in_batches(call, [&](const Table& table, int blocks) {
            lion<P, G, M><<<blocks, kThreads, 0, stream_of(call)>>>(table, settings);
        });
    }
};

}  // namespace

extern "C" {

// A cudaError_t; 0 when the work is in the stream.
int ds_fused_lion(const ds::Call* call) { return ds::by_codes<Lion>(call); }

const char* ds_fused_lion_error(int error) { return cudaGetErrorName(static_cast<cudaError_t>(error)); }
}

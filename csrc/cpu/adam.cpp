// Adam and AdamW over one range of flat host memory (Kingma and Ba 2015; Loshchilov and Hutter 2019).
//
// One pass: weights, gradient and both moments in (each fp32, bf16 or fp16); weights, moments and, where the weights are fp32 and
// it is wanted, a rounded copy of them out. The arithmetic is fp32; each result is rounded once.

#include <cstdint>
#include <cstring>

#include "common/dispatch.h"
#include "common/output.h"
#include "common/stream.h"

namespace {

using namespace ds;

struct Settings {
    float step, one1, one2, eps, decay, keep, grad_scale, sqrt_correct2;
};

struct RawArgs {
    int64_t count;
    void* weights;
    const void* grad;
    void* exp_avg;
    void* exp_avg_sq;
    void* out;
    Settings s;
};

template <class Weight, class Grad, class Moment, class Out>
struct Adam {
    using Args = RawArgs;

    static inline __attribute__((always_inline)) void run(const RawArgs& a) {
        Weight* __restrict weights = static_cast<Weight*>(a.weights);
        const Grad* __restrict grad = static_cast<const Grad*>(a.grad);
        Moment* __restrict exp_avg = static_cast<Moment*>(a.exp_avg);
        Moment* __restrict exp_avg_sq = static_cast<Moment*>(a.exp_avg_sq);
        Out* __restrict out = static_cast<Out*>(a.out);
        const float scale = a.s.grad_scale, one1 = a.s.one1, one2 = a.s.one2, beta2 = 1.0f - one2, eps = a.s.eps;
        const float decay = a.s.decay, keep = a.s.keep, step = -a.s.step, root = a.s.sqrt_correct2;
        const bool coupled = decay != 0.0f;
        const int64_t count = a.count;
        for (int64_t i = 0; i < count; ++i) {
            const float old = Weight::get(weights[i]);
            const float own = Grad::get(grad[i]) * scale;
            const float g = coupled ? __builtin_fmaf(decay, old, own) : own;
            const float m = Moment::get(exp_avg[i]), v = Moment::get(exp_avg_sq[i]);
            const float m2 = __builtin_fmaf(one1, g - m, m);
            const float v2 = __builtin_fmaf(one2 * g, g, beta2 * v);
            const float denominator = __builtin_sqrtf(v2) / root + eps;
            const float now = __builtin_fmaf(step, m2 / denominator, old * keep);
            exp_avg[i] = Moment::make(m2);
            exp_avg_sq[i] = Moment::make(v2);
            weights[i] = Weight::make(now);
            write_out(out, i, now);
        }
    }
};

}  // namespace

extern "C" {

// Dtype codes: 0 fp32, 1 bf16, 2 fp16; -1 for no rounded output, the only one beside weights of 16 bits. Returns 0, or 1 for other
// codes (nothing is changed then).
// The betas come in double: 1 - 0.999 taken in fp32 is off by 5e-5 of itself.
// step = lr / (1 - beta1^t) and sqrt_correct2 = sqrt(1 - beta2^t), or lr and 1 without bias correction. decay is added to the
// gradient (L2); keep = 1 - lr * decay multiplies the weight instead (decoupled): at most one of them does something.
int ds_adam_step(int64_t count, void* weights, const void* grad, void* exp_avg, void* exp_avg_sq, void* out, int weight_code, int grad_code,
                 int moment_code, int out_code, float step, double beta1, double beta2, float eps, float decay, float keep, float grad_scale,
                 float sqrt_correct2) {
    const RawArgs args{count, weights, grad, exp_avg, exp_avg_sq, out,
                       Settings{step, static_cast<float>(1.0 - beta1), static_cast<float>(1.0 - beta2), eps, decay, keep, grad_scale,
                                sqrt_correct2}};
    return ds::by_codes<Adam>(args, weight_code, grad_code, moment_code, out_code);
}

// The same over fp32 weights and moments, to the bit, but what is new goes elsewhere: past the caches, so that it costs the memory no
// more bytes than an update in place.
int ds_adam_step_beside(int64_t count, const float* weights, const void* grad, const float* exp_avg, const float* exp_avg_sq, void* out,
                        float* new_weights, float* new_exp_avg, float* new_exp_avg_sq, int grad_code, int out_code, float step, double beta1,
                        double beta2, float eps, float decay, float keep, float grad_scale, float sqrt_correct2) {
    constexpr int64_t kBlock = 512;             // elements that stay in the first cache
    alignas(64) float block[3][kBlock + 64];  // no two at the same place of a page
    const float* const from[3] = {weights, exp_avg, exp_avg_sq};
    float* const to[3] = {new_weights, new_exp_avg, new_exp_avg_sq};
    const int64_t grad_width = grad_code == 0 ? 4 : 2, out_width = out_code == 0 ? 4 : 2;
    for (int64_t start = 0; start < count; start += kBlock) {
        const int64_t numel = count - start < kBlock ? count - start : kBlock;
        for (int i = 0; i < 3; ++i) std::memcpy(block[i], from[i] + start, numel * sizeof(float));
        const int status = ds_adam_step(numel, block[0], static_cast<const char*>(grad) + start * grad_width, block[1], block[2],
                                        out ? static_cast<char*>(out) + start * out_width : nullptr, 0, grad_code, 0, out_code, step, beta1,
                                        beta2, eps, decay, keep, grad_scale, sqrt_correct2);
        if (status) return status;
        for (int i = 0; i < 3; ++i) ds::stream_out(to[i] + start, block[i], numel * sizeof(float));
    }
    ds::stream_end();
    return 0;
}
}

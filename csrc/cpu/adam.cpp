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
    const void* from[3];  // weights, exp_avg and exp_avg_sq as they are
    const void* grad;
    void* to[3];  // and where the new ones go: the same places, or others
    void* out;
    Settings s;
};

template <class Weight, class Grad, class Moment, class Out>
struct Adam {
    using Args = RawArgs;

    static inline __attribute__((always_inline)) void run(const RawArgs& a) {
        const Weight* weights = static_cast<const Weight*>(a.from[0]);
        const Moment* exp_avg = static_cast<const Moment*>(a.from[1]);
        const Moment* exp_avg_sq = static_cast<const Moment*>(a.from[2]);
        const Grad* __restrict grad = static_cast<const Grad*>(a.grad);
        Weight* new_weights = static_cast<Weight*>(a.to[0]);
        Moment* new_exp_avg = static_cast<Moment*>(a.to[1]);
        Moment* new_exp_avg_sq = static_cast<Moment*>(a.to[2]);
        Out* __restrict out = static_cast<Out*>(a.out);
        const float scale = a.s.grad_scale, one1 = a.s.one1, one2 = a.s.one2, beta2 = 1.0f - one2, eps = a.s.eps;
        const float decay = a.s.decay, keep = a.s.keep, step = -a.s.step, root = a.s.sqrt_correct2;
        const bool coupled = decay != 0.0f;
        const int64_t count = a.count;
#pragma GCC ivdep  // from and to may be one place, so __restrict would be untrue; each element depends on itself only
        for (int64_t i = 0; i < count; ++i) {
            const float old = Weight::get(weights[i]);
            const float own = Grad::get(grad[i]) * scale;
            const float g = coupled ? __builtin_fmaf(decay, old, own) : own;
            const float m = Moment::get(exp_avg[i]), v = Moment::get(exp_avg_sq[i]);
            const float m2 = __builtin_fmaf(one1, g - m, m);
            const float v2 = __builtin_fmaf(one2 * g, g, beta2 * v);
            const float denominator = __builtin_sqrtf(v2) / root + eps;
            const float now = __builtin_fmaf(step, m2 / denominator, old * keep);
            new_exp_avg[i] = Moment::make(m2);
            new_exp_avg_sq[i] = Moment::make(v2);
            new_weights[i] = Weight::make(now);
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
    const RawArgs args{count, {weights, exp_avg, exp_avg_sq}, grad, {weights, exp_avg, exp_avg_sq}, out,
                       Settings{step, static_cast<float>(1.0 - beta1), static_cast<float>(1.0 - beta2), eps, decay, keep, grad_scale,
                                sqrt_correct2}};
    return ds::by_codes<Adam>(args, weight_code, grad_code, moment_code, out_code);
}

// The same over fp32 weights and moments, to the bit, but what is new goes elsewhere: past the caches, so that it costs the memory no
// more bytes than an update in place. 128 elements of each: blocks of 64 to 256 took least time, larger ones half as much again.
int ds_adam_step_beside(int64_t count, const float* weights, const void* grad, const float* exp_avg, const float* exp_avg_sq, void* out,
                        float* new_weights, float* new_exp_avg, float* new_exp_avg_sq, int grad_code, int out_code, float step, double beta1,
                        double beta2, float eps, float decay, float keep, float grad_scale, float sqrt_correct2) {
    constexpr int64_t kBlock = 128;
    alignas(64) float block[3][kBlock + 64];  // no two at the same place of a page
    float* const to[3] = {new_weights, new_exp_avg, new_exp_avg_sq};
    const int64_t grad_width = grad_code == 0 ? 4 : 2, out_width = out_code == 0 ? 4 : 2;
    RawArgs args{0, {weights, exp_avg, exp_avg_sq}, grad, {block[0], block[1], block[2]}, out,
                 Settings{step, static_cast<float>(1.0 - beta1), static_cast<float>(1.0 - beta2), eps, decay, keep, grad_scale,
                          sqrt_correct2}};
    for (int64_t start = 0; start < count; start += kBlock) {
        args.count = count - start < kBlock ? count - start : kBlock;
        args.from[0] = weights + start;
        args.from[1] = exp_avg + start;
        args.from[2] = exp_avg_sq + start;
        args.grad = static_cast<const char*>(grad) + start * grad_width;
        if (out) args.out = static_cast<char*>(out) + start * out_width;
        const int status = ds::by_codes<Adam>(args, 0, grad_code, 0, out_code);
        if (status) return status;
        for (int i = 0; i < 3; ++i) ds::stream_out(to[i] + start, block[i], args.count * sizeof(float));
    }
    ds::stream_end();
    return 0;
}
}

// Adagrad over one range of flat host memory (Duchi et al. 2011). One pass, fp32 arithmetic; see adam.cpp for the layout.

#include <cstdint>

#include "common/dispatch.h"
#include "common/output.h"

namespace {

using namespace ds;

struct RawArgs {
    int64_t count;
    void* weights;
    const void* grad;
    void* sum;
    void* out;
    float rate, eps, decay, grad_scale;
};

template <class Weight, class Grad, class Moment, class Out>
struct Work {
    using Args = RawArgs;

    static inline __attribute__((always_inline)) void run(const RawArgs& a) {
        Weight* __restrict weights = static_cast<Weight*>(a.weights);
        const Grad* __restrict grad = static_cast<const Grad*>(a.grad);
        Moment* __restrict sum = static_cast<Moment*>(a.sum);
        Out* __restrict out = static_cast<Out*>(a.out);
        const float rate = -a.rate, eps = a.eps, decay = a.decay, scale = a.grad_scale;
        const bool coupled = decay != 0.0f;
        const int64_t count = a.count;
        for (int64_t i = 0; i < count; ++i) {
            const float old = Weight::get(weights[i]);
            const float own = Grad::get(grad[i]) * scale;
            const float g = coupled ? __builtin_fmaf(decay, old, own) : own;
            const float s = __builtin_fmaf(g, g, Moment::get(sum[i]));
            const float now = __builtin_fmaf(rate, g / (__builtin_sqrtf(s) + eps), old);
            sum[i] = Moment::make(s);
            weights[i] = Weight::make(now);
            write_out(out, i, now);
        }
    }
};

}  // namespace

extern "C" {

// rate = lr / (1 + (t - 1) * lr_decay). Codes and result as in ds_adam_step.
int ds_adagrad_step(int64_t count, void* weights, const void* grad, void* sum, void* out, int weight_code, int grad_code, int moment_code,
                    int out_code, float rate, float eps, float decay, float grad_scale) {
    const RawArgs args{count, weights, grad, sum, out, rate, eps, decay, grad_scale};
    return ds::by_codes<Work>(args, weight_code, grad_code, moment_code, out_code);
}
}

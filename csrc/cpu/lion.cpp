// Lion over one range of flat host memory (Chen et al. 2023). One pass, fp32 arithmetic; see adam.cpp for the layout.

#include <cstdint>

#include "common/dispatch.h"
#include "common/output.h"

namespace {

using namespace ds;

struct RawArgs {
    int64_t count;
    void* weights;
    const void* grad;
    void* exp_avg;
    void* out;
    float lr, one1, one2, keep, grad_scale;
};

template <class Weight, class Grad, class Moment, class Out>
struct Work {
    using Args = RawArgs;

    static inline __attribute__((always_inline)) void run(const RawArgs& a) {
        Weight* __restrict weights = static_cast<Weight*>(a.weights);
        const Grad* __restrict grad = static_cast<const Grad*>(a.grad);
        Moment* __restrict exp_avg = static_cast<Moment*>(a.exp_avg);
        Out* __restrict out = static_cast<Out*>(a.out);
        const float lr = a.lr, one1 = a.one1, one2 = a.one2, keep = a.keep, scale = a.grad_scale;
        const int64_t count = a.count;
        for (int64_t i = 0; i < count; ++i) {
            const float g = Grad::get(grad[i]) * scale;
            const float m = Moment::get(exp_avg[i]);
            const float toward = __builtin_fmaf(one1, g - m, m);
            // The sign; zero stays zero, and not-a-number goes on into the weight.
            const float sign = toward > 0.0f ? 1.0f : toward < 0.0f ? -1.0f : toward;
            const float now = __builtin_fmaf(-lr, sign, Weight::get(weights[i]) * keep);
            exp_avg[i] = Moment::make(__builtin_fmaf(one2, g - m, m));
            weights[i] = Weight::make(now);
            write_out(out, i, now);
        }
    }
};

}  // namespace

extern "C" {

// keep = 1 - lr * weight_decay. Codes and result as in ds_adam_step.
int ds_lion_step(int64_t count, void* weights, const void* grad, void* exp_avg, void* out, int weight_code, int grad_code, int moment_code,
                 int out_code, float lr, double beta1, double beta2, float keep, float grad_scale) {
    const RawArgs args{count, weights, grad, exp_avg, out, lr, static_cast<float>(1.0 - beta1), static_cast<float>(1.0 - beta2),
                       keep, grad_scale};
    return ds::by_codes<Work>(args, weight_code, grad_code, moment_code, out_code);
}
}

// The optional rounded copy of the weights, and the choice of a loop by dtype codes.
#pragma once

#include "common/dispatch.h"

namespace ds {

// Takes the place of an output that is not wanted.
struct Nothing {};

template <class Out>
DS_INLINE void write_out(Out* out, int64_t i, float value) {
    out[i] = Out::make(value);
}

DS_INLINE void write_out(Nothing*, int64_t, float) {}

template <template <class, class, class, class> class Work, class Grad, class Moment, class Args>
int by_weight_and_out(const Args& args, int weight, int out) {
    if (weight != 0 && out != -1) return 1;  // weights of 16 bits are rounded as they are written
    switch (weight) {
        case 0: break;
        case 1: run<Work<BF16, Grad, Moment, Nothing>>(args); return 0;
        case 2: run<Work<F16, Grad, Moment, Nothing>>(args); return 0;
        default: return 1;
    }
    switch (out) {
        case -1: run<Work<F32, Grad, Moment, Nothing>>(args); return 0;
        case 0: run<Work<F32, Grad, Moment, F32>>(args); return 0;
        case 1: run<Work<F32, Grad, Moment, BF16>>(args); return 0;
        case 2: run<Work<F32, Grad, Moment, F16>>(args); return 0;
        default: return 1;
    }
}

template <template <class, class, class, class> class Work, class Grad, class Args>
int by_moment(const Args& args, int weight, int moment, int out) {
    switch (moment) {
        case 0: return by_weight_and_out<Work, Grad, F32>(args, weight, out);
        case 1: return by_weight_and_out<Work, Grad, BF16>(args, weight, out);
        case 2: return by_weight_and_out<Work, Grad, F16>(args, weight, out);
        default: return 1;
    }
}

// Dtype codes: 0 fp32, 1 bf16, 2 fp16; -1 for no output, the only one beside weights of 16 bits. Returns 0, or 1 for other codes.
template <template <class, class, class, class> class Work, class Args>
int by_codes(const Args& args, int weight, int grad, int moment, int out) {
    switch (grad) {
        case 0: return by_moment<Work, F32>(args, weight, moment, out);
        case 1: return by_moment<Work, BF16>(args, weight, moment, out);
        case 2: return by_moment<Work, F16>(args, weight, moment, out);
        default: return 1;
    }
}

}  // namespace ds

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

template <template <class, class, class> class Work, class Grad, class Moment, class Args>
int by_out(const Args& args, int out) {
    switch (out) {
        case -1: run<Work<Grad, Moment, Nothing>>(args); return 0;
        case 0: run<Work<Grad, Moment, F32>>(args); return 0;
        case 1: run<Work<Grad, Moment, BF16>>(args); return 0;
        case 2: run<Work<Grad, Moment, F16>>(args); return 0;
        default: return 1;
    }
}

template <template <class, class, class> class Work, class Grad, class Args>
int by_moment(const Args& args, int moment, int out) {
    switch (moment) {
        case 0: return by_out<Work, Grad, F32>(args, out);
        case 1: return by_out<Work, Grad, BF16>(args, out);
        case 2: return by_out<Work, Grad, F16>(args, out);
        default: return 1;
    }
}

// Dtype codes: 0 fp32, 1 bf16, 2 fp16; -1 for no output. Returns 0, or 1 for an unknown code.
template <template <class, class, class> class Work, class Args>
int by_codes(const Args& args, int grad, int moment, int out) {
    switch (grad) {
        case 0: return by_moment<Work, F32>(args, moment, out);
        case 1: return by_moment<Work, BF16>(args, moment, out);
        case 2: return by_moment<Work, F16>(args, moment, out);
        default: return 1;
    }
}

}  // namespace ds

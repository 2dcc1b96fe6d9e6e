// One loop, compiled for the instruction sets of the machine and chosen when it runs.
//
// The loops use explicit fused multiply-add everywhere and otherwise only operations that IEEE 754 rounds exactly, so every
// version gives the same bits for every element, wherever the element stands in the range.
#pragma once

#include <cstdlib>
#include <cstring>

#include "common/lowp.h"

namespace ds {

enum Isa { kPlain = 0, kAvx2 = 1, kAvx512 = 2 };

// The best set that the machine has and DS_CPU_ISA (plain, avx2, avx512) allows.
inline int choose_isa() {
#if defined(__x86_64__)
    int best = kPlain;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) best = kAvx2;
    if (best == kAvx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        best = kAvx512;
    if (const char* wanted = std::getenv("DS_CPU_ISA")) {
        const int limit = !std::strcmp(wanted, "plain") ? kPlain : !std::strcmp(wanted, "avx2") ? kAvx2 : kAvx512;
        if (limit < best) best = limit;
    }
    return best;
#else
    return kPlain;
#endif
}

#if defined(__x86_64__)
#if defined(__clang__)  // takes all 512 bits unasked, and would ignore an attribute with a word that it does not know
#define DS_WIDE ""
#else
#define DS_WIDE ",prefer-vector-width=512"
#endif
#define DS_TARGET_AVX2 __attribute__((target("avx2,fma")))
#define DS_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma" DS_WIDE)))
#else
#define DS_TARGET_AVX2
#define DS_TARGET_AVX512
#endif

// Work(args) is an always_inline functor; it is instantiated once per instruction set.
template <class Work>
DS_TARGET_AVX512 __attribute__((noinline)) void run_avx512(const typename Work::Args& args) {
    Work::run(args);
}

template <class Work>
DS_TARGET_AVX2 __attribute__((noinline)) void run_avx2(const typename Work::Args& args) {
    Work::run(args);
}

template <class Work>
__attribute__((noinline)) void run_plain(const typename Work::Args& args) {
    Work::run(args);
}

template <class Work>
void run(const typename Work::Args& args) {
    static const int isa = choose_isa();
    if (isa == kAvx512)
        run_avx512<Work>(args);
    else if (isa == kAvx2)
        run_avx2<Work>(args);
    else
        run_plain<Work>(args);
}

}  // namespace ds

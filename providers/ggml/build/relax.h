// Included before ggml-cpu.c on x86.
//
// ggml's threads wait for each other, after every node of a graph, by executing PAUSE in a loop. Where another
// program wants the processor that loop keeps it from the very thread it waits for, until the system takes the
// processor away: milliseconds for each of hundreds of nodes. Here one PAUSE in 256 becomes an offer to the system
// to run somebody else; on an idle machine that costs nothing that could be measured.
#pragma once

#include <immintrin.h>
#include <sched.h>

static inline void sdrun_relax(void) {
    static _Thread_local unsigned spins;
    if (++spins % 256 == 0) {
        sched_yield();
    } else {
        __builtin_ia32_pause();
    }
}

#define _mm_pause() sdrun_relax()
